"""PyTorch tensors: `adapter`, what limelight asks of them; `eager` and `operator`, how calls run."""
