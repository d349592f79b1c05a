"""`pdq up`: the whole stack as supervised processes on this machine.

nats-server, LMCache, the router, a prefill and a decode worker. One supervisor starts them in order, restarts
what dies and stops them in the reverse order; a guard ends what a killed supervisor leaves. Nothing of a stack
outlives it. `run.up` is the foreground, `background` starts and ends a stack from another process, and
`record` tells everybody else what runs.
"""
