collect_ignore = ["oracle"]  # scripts for a CUDA build of torch
