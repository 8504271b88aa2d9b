"""How the collectives of a recording become operators of a trace, and the memories that they write values of their own.

It rewrites recordings. It imports how programs are recorded, and no trace that is made of them."""
