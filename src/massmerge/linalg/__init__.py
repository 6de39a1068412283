"""The mathematics of the method, and LAPACK's partial eigensolver."""
