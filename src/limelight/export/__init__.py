"""Export: the kernels as files that any language can load, compiled without a GPU.

    limelight.export.compile("folder", targets=["sm_80"], dtypes=["float16"], biases=["alibi"])

A `variant.py` is what is launched for one kind of attention; `tracer.py` makes it of the plan that
runs at each call, given numbers that remember how they were made (`traced.py`). `build.py` compiles
in parallel, `manifest.py` says in words what the folder holds, `c_source.py` in tables for C.
docs/export.md is for the folder's readers.
"""

from limelight.export.build import Export as Export
from limelight.export.build import SpillError as SpillError
from limelight.export.build import compile as compile
from limelight.export.manifest import ManifestError as ManifestError
from limelight.export.manifest import validate as validate
