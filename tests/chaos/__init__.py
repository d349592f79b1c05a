"""The chaos kit: many requests while processes die, stop, drain and lose the network, and every log checked."""
