"""What makes answers faster and changes nothing else."""
