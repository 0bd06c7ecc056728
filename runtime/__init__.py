"""What every script needs around the mathematics: processes, precision, checkpoints, metrics, memory, rollouts."""
