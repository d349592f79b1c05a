"""Many requests from a file of JSON lines, their answers into another; memory does not grow with the file."""
