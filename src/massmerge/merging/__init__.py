"""From a recipe to a bundle. Not `merge`: that name is the function `massmerge.merge`."""
