"""PyTorch: `adapter`, what limelight asks of tensors; `eager` and `operator`, how calls run."""
