"""What torch.distributed is asked: which operators are collectives, which processes form a group, what lies behind a sharded
tensor, when the program waits.

This package never imports recording or assembly: it knows no recorder and no trace."""
