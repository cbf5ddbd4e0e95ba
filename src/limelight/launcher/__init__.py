"""The launcher: compile kernels for a target, keep them, launch them through the CUDA driver.

    recipe = Recipe(function=forward, signature={...}, target=(9, 0), num_warps=8)
    kernel = default_cache().kernel(recipe, device=0, stream=stream)   # keep it
    kernel(0, stream, grid=(tiles, heads, 1), args=(query, key, ..., scale))

`signature.py` says how a signature is written, `recipe.py` what decides a kernel, `compile.py` how
it is compiled and `abi.py` checked, `cache.py` how it is kept, `driver.py` and `launch.py` how it
runs. No framework is involved; addresses, streams and scratch memory come from the caller.
"""

from limelight.launcher.abi import AbiError as AbiError
from limelight.launcher.binary import Binary as Binary
from limelight.launcher.binary import SharedMemoryError as SharedMemoryError
from limelight.launcher.cache import Cache as Cache
from limelight.launcher.cache import default_cache as default_cache
from limelight.launcher.compile import CompileError as CompileError
from limelight.launcher.compile import compile_kernel as compile_kernel
from limelight.launcher.driver import CaptureError as CaptureError
from limelight.launcher.driver import Driver as Driver
from limelight.launcher.driver import DriverError as DriverError
from limelight.launcher.driver import DriverNotFound as DriverNotFound
from limelight.launcher.launch import Allocate as Allocate
from limelight.launcher.launch import Bound as Bound
from limelight.launcher.launch import Kernel as Kernel
from limelight.launcher.recipe import Recipe as Recipe
from limelight.launcher.signature import Constant as Constant
from limelight.launcher.signature import Parameter as Parameter
