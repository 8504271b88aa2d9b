"""A model of a training step's time where processes exchange tensors: what of the transfers hides behind computing, and what
would if they began earlier, were joined, or had a process group of their own.

It imports what passes share and data sheets, and no pass, no lowering and no kernels."""
