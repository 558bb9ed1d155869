"""The gRPC API: servicers that convert at the edge and call `qerld_learner.core.Learner`, nothing else."""
