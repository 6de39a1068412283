"""From a recipe to a bundle.

`open_recipe` opens the sources, and `plan` says what will be done with each tensor.
`run` does it: `originals` reads a tensor of base and experts, what is made of it waits in the merge folder.
`write` puts the bundle together, and `static/write` an ordinary checkpoint.

Not `merge`: that name is the function `massmerge.merge`.
"""
