"""From a recipe to a bundle: prepare, plan, factor, write. (A function `massmerge.merge` exists, so this is not `merge`.)"""
