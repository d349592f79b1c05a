"""Workers that exist only while there is work: `python -m tests.scaling`."""
