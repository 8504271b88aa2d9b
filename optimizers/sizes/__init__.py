"""One program at another size: what the passes made at three sizes tells what they would make at a fourth.

    numbers.py      numbers at three sizes -> the number at another one
    traces.py       traces at three sizes -> the trace at another one, its values worked out op by op
    texts.py        texts at three sizes -> the text with names in the place of numbers, and what these are at another size

One size varies, and the three programs differ in numbers alone. Each of these numbers is `c + d * size` or
`c + d * size ** 2`, which two sizes say and the third one confirms. The difference of two such numbers is
`a + b * size + c * size ** 2`, which has at most two positive zeros (Descartes' rule of signs): **what is equal at three sizes
is equal at all of them**. So a rewrite that a pass made in all three programs because two numbers were equal there, such as
two shapes, or the end of one slice and the start of the next, holds at any size. What a pass chose by comparing costs is right
at any size too, if maybe not the best.

Nothing is taken on trust that can be asked: what each op yields at the new size is worked out by torch's own rules, and is
held against what the numbers say. `NotAlike` is raised wherever something does not fit, and the program is then made anew.

This package never imports passes.
"""
