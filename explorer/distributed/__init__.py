"""What torch.distributed is asked: which processes form a group, what lies behind a sharded tensor, when the program waits.

A room at the bottom: it imports no recorder, and nothing that assembles, runs or shows a program."""
