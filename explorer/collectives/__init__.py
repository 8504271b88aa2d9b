"""How the collectives of a recording become operators of a trace, and the memories that they write values of their own.

It rewrites recordings. This package never imports assembly: it knows no trace that is made of them."""
