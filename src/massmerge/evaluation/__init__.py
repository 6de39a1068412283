"""How good a bundle is: suites of labelled data, figures that cannot flatter, reports."""
