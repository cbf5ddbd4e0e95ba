"""Export: the kernels as files that any language can load, compiled without a GPU.

    limelight.export.compile("folder", targets=["sm_80"], dtypes=["float16"], biases=["alibi"])

`variant.py` plans the launches of a variant with traced numbers, `build.py` compiles them in
parallel, `manifest.py` says in words what the folder holds. docs/export.md is for its readers.
"""

from limelight.export.build import Export as Export
from limelight.export.build import SpillError as SpillError
from limelight.export.build import compile as compile
from limelight.export.manifest import ManifestError as ManifestError
from limelight.export.manifest import validate as validate
