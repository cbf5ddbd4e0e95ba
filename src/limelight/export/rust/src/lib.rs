//! Fused attention on NVIDIA GPUs: `softmax(scale * query key^T + bias, masked) value`, and its
//! gradients, from kernels that limelight exported. They are in this crate, as machine code and as
//! PTX; it depends on nothing but NVIDIA's driver, which it opens on first use.
//!
//! A forward and a backward with ALiBi under a causal mask:
//!
//! ```no_run
//! use limelight::{Backward, DType, Error, Forward, Problem, Stream, Tensor, Workspace};
//!
//! # fn main() -> Result<(), Error> {
//! # let allocate = |bytes: usize| bytes as u64;
//! # let (query, key, value, slopes, out, lse) = (0, 0, 0, 0, 0, 0);
//! # let (d_out, d_query, d_key, d_value, d_slopes) = (0, 0, 0, 0, 0);
//! let problem = Problem {
//!     mask: "causal".parse()?,
//!     bias: "alibi".parse()?,
//!     bias_gradients: true,
//!     batch: 2,
//!     q_heads: 8,
//!     kv_heads: 8,
//!     q_len: 1000,
//!     kv_len: 1000,
//!     ..Problem::new(DType::Float16, 64)
//! };
//! // Addresses on the device, (batch, heads, length, dim).
//! let shape = [2, 8, 1000, 64];
//! let forward = Forward {
//!     query: Tensor::contiguous(query, shape),
//!     key: Tensor::contiguous(key, shape),
//!     value: Tensor::contiguous(value, shape),
//!     bias_tensors: &[Tensor::flat(slopes)], // [heads] float32
//!     out: Tensor::contiguous(out, shape),
//!     lse: Tensor::flat(lse), // [batch, heads, length] float32, for the backward
//!     ..Forward::default()
//! };
//! // SAFETY: every address is of a live allocation of the current context.
//! unsafe { problem.forward(&forward, Workspace::NONE, Stream::DEFAULT)? };
//!
//! let backward = Backward {
//!     forward,
//!     d_out: Tensor::contiguous(d_out, shape),
//!     d_query: Tensor::contiguous(d_query, shape), // leave out what you do not want
//!     d_key: Tensor::contiguous(d_key, shape),
//!     d_value: Tensor::contiguous(d_value, shape),
//!     d_bias_tensors: &[Tensor::flat(d_slopes)],
//!     ..Backward::default()
//! };
//! let bytes = problem.backward_workspace(&backward)?;
//! let workspace = Workspace { address: allocate(bytes), bytes };
//! // SAFETY: as above.
//! unsafe { problem.backward(&backward, workspace, Stream::DEFAULT)? };
//! # Ok(())
//! # }
//! ```
//!
//! Work runs on the context that is current in the calling thread, on the stream that is given, and
//! the calls return at once. Nothing is allocated on the device. Everything may be called from any
//! thread. Nothing is launched unless everything fits: what does not is an [`Error`] of its own.
//!
//! The driver is `libcuda.so.1`, or what the environment variable `LIMELIGHT_DRIVER` names, such as a
//! stand-in for tests.
//!
//! To launch through another library's driver calls (`load_ptx` and the like), take what
//! [`Problem::plan_forward`] and [`Problem::plan_backward`] return.

#![deny(
    missing_docs,
    unsafe_op_in_unsafe_fn,
    clippy::undocumented_unsafe_blocks
)]
#[cfg(not(unix))]
compile_error!("limelight opens the driver with dlopen, which this system does not have");

mod driver;
mod error;
mod plan;
#[allow(dead_code)] // what an export has decides
#[rustfmt::skip]
mod tables;

use std::ffi::c_void;
use std::fmt;
use std::str::FromStr;

pub use error::Error;
use plan::Operation;
pub use tables::{Bias, Mask};

/// Of query, key, value, out and their gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE's half precision.
    Float16,
    /// Eight bits of exponent and of precision; from sm_80 on.
    BFloat16,
    /// Single precision.
    Float32,
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::Float16 => "float16",
            DType::BFloat16 => "bfloat16",
            DType::Float32 => "float32",
        })
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Bias {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mask {
    type Err = Error;

    /// From its name in the manifest.
    ///
    /// ```
    /// use limelight::{Error, Mask};
    ///
    /// assert!(matches!("nothing of the kind".parse::<Mask>(), Err(Error::NotExported(_))));
    /// for mask in Mask::ALL {
    ///     assert_eq!(mask.name().parse(), Ok(*mask));
    /// }
    /// ```
    fn from_str(name: &str) -> Result<Mask, Error> {
        let found = Mask::ALL.iter().find(|each| each.name() == name);
        found
            .copied()
            .ok_or_else(|| Error::NotExported(format!("mask {name}: found none in this export")))
    }
}

impl FromStr for Bias {
    type Err = Error;

    /// From its name in the manifest.
    fn from_str(name: &str) -> Result<Bias, Error> {
        let found = Bias::ALL.iter().find(|each| each.name() == name);
        found
            .copied()
            .ok_or_else(|| Error::NotExported(format!("bias {name}: found none in this export")))
    }
}

/// One attention: which kernels, and of what sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Problem {
    /// Of query, key, value, out and their gradients.
    pub dtype: DType,
    /// Of query and key.
    pub head_dim: usize,
    /// Of value and out; `None`: as `head_dim`.
    pub value_dim: Option<usize>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// What is added to the scores.
    pub bias: Bias,
    /// Whether a backward computes the gradients of the bias's tensors too.
    pub bias_gradients: bool,
    /// Elements of the batch.
    pub batch: usize,
    /// Query head h reads head `h / (q_heads / kv_heads)` of keys and values.
    pub q_heads: usize,
    /// A divisor of `q_heads`.
    pub kv_heads: usize,
    /// Queries in each head.
    pub q_len: usize,
    /// Keys in each head.
    pub kv_len: usize,
    /// The position of the first query; `kv_len - q_len` aligns the last query with the last key.
    pub query_start: i64,
    /// `None`: 1 / sqrt(head_dim).
    pub scale: Option<f64>,
    /// `Some(c)`: scores s become c * tanh(s / c).
    pub softcap: Option<f64>,
    /// To try another GPU's kernels: `Some(61)` takes those of sm_61. `None`: what suits best.
    pub target: Option<u32>,
    /// Has the driver assemble the PTX, also where machine code would suit.
    pub from_ptx: bool,
}

impl Problem {
    /// One head without queries or keys, without a mask or a bias.
    ///
    /// ```
    /// use limelight::{Bias, DType, Problem};
    ///
    /// let problem = Problem { q_len: 7, kv_len: 7, ..Problem::new(DType::Float16, 64) };
    /// assert_eq!((problem.batch, problem.bias), (1, Bias::None));
    /// ```
    pub fn new(dtype: DType, head_dim: usize) -> Problem {
        Problem {
            dtype,
            head_dim,
            value_dim: None,
            mask: Mask::None,
            bias: Bias::None,
            bias_gradients: false,
            batch: 1,
            q_heads: 1,
            kv_heads: 1,
            q_len: 0,
            kv_len: 0,
            query_start: 0,
            scale: None,
            softcap: None,
            target: None,
            from_ptx: false,
        }
    }

    /// Launches a forward, and returns at once.
    ///
    /// # Safety
    /// Every address is of memory on the device of the current context that is as large as the
    /// shapes and strides say, and stays so until the work is done; nothing else writes to what is
    /// read, or uses what is written. The stream is of the current context.
    pub unsafe fn forward(
        &self,
        tensors: &Forward<'_>,
        workspace: Workspace,
        stream: Stream,
    ) -> Result<(), Error> {
        let tensors = Backward::of(tensors);
        // SAFETY: the caller's.
        unsafe { self.launch(Operation::Forward, &tensors, workspace, stream) }
    }

    /// Launches a backward, and returns at once.
    ///
    /// # Safety
    /// As of [`Problem::forward`].
    pub unsafe fn backward(
        &self,
        tensors: &Backward<'_>,
        workspace: Workspace,
        stream: Stream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's.
        unsafe { self.launch(Operation::Backward, tensors, workspace, stream) }
    }

    /// The bytes of workspace that a forward needs. Addresses need not be given yet.
    pub fn forward_workspace(&self, tensors: &Forward<'_>) -> Result<usize, Error> {
        let gpu = Gpu::current()?;
        plan::workspace(self, Operation::Forward, &Backward::of(tensors), gpu)
    }

    /// The bytes of workspace that a backward needs. Addresses need not be given yet.
    pub fn backward_workspace(&self, tensors: &Backward<'_>) -> Result<usize, Error> {
        plan::workspace(self, Operation::Backward, tensors, Gpu::current()?)
    }

    /// Loads what a forward will need onto the current context: then it can be captured in a graph.
    /// Sizes need not be given yet.
    pub fn preload_forward(&self) -> Result<(), Error> {
        self.preload(Operation::Forward)
    }

    /// Loads what a backward will need, as [`Problem::preload_forward`] does.
    pub fn preload_backward(&self) -> Result<(), Error> {
        self.preload(Operation::Backward)
    }

    /// What [`Problem::forward`] would launch on a GPU. No driver is needed, and none is asked.
    ///
    /// ```
    /// use limelight::{DType, Error, Forward, Gpu, Problem, Workspace};
    ///
    /// let a_kepler = Gpu { capability: 35, shared: 48 * 1024 };
    /// let problem = Problem::new(DType::Float16, 64);
    /// let found = problem.plan_forward(&Forward::default(), Workspace::NONE, a_kepler);
    /// assert!(matches!(found, Err(Error::WrongArchitecture(_) | Error::NotExported(_))));
    /// ```
    pub fn plan_forward(
        &self,
        tensors: &Forward<'_>,
        workspace: Workspace,
        gpu: Gpu,
    ) -> Result<Vec<Launch>, Error> {
        plan::launches(
            self,
            Operation::Forward,
            &Backward::of(tensors),
            workspace,
            gpu,
        )
    }

    /// What [`Problem::backward`] would launch on a GPU.
    pub fn plan_backward(
        &self,
        tensors: &Backward<'_>,
        workspace: Workspace,
        gpu: Gpu,
    ) -> Result<Vec<Launch>, Error> {
        plan::launches(self, Operation::Backward, tensors, workspace, gpu)
    }

    /// As [`Problem::forward_workspace`], of a GPU that need not be here.
    pub fn plan_forward_workspace(&self, tensors: &Forward<'_>, gpu: Gpu) -> Result<usize, Error> {
        plan::workspace(self, Operation::Forward, &Backward::of(tensors), gpu)
    }

    /// As [`Problem::backward_workspace`], of a GPU that need not be here.
    pub fn plan_backward_workspace(
        &self,
        tensors: &Backward<'_>,
        gpu: Gpu,
    ) -> Result<usize, Error> {
        plan::workspace(self, Operation::Backward, tensors, gpu)
    }

    /// # Safety
    /// As of [`Problem::forward`].
    unsafe fn launch(
        &self,
        operation: Operation,
        tensors: &Backward<'_>,
        workspace: Workspace,
        stream: Stream,
    ) -> Result<(), Error> {
        let driver = driver::driver()?;
        let place = driver.place()?;
        // All are checked before the first is launched.
        for launch in &mut plan::launches(self, operation, tensors, workspace, place.gpu)? {
            // SAFETY: the caller's.
            unsafe { driver.launch(launch, place, stream)? };
        }
        Ok(())
    }

    fn preload(&self, operation: Operation) -> Result<(), Error> {
        let driver = driver::driver()?;
        let place = driver.place()?;
        let (variant, from_ptx) = plan::choose(self, operation, place.gpu)?;
        for launch in variant.launches {
            driver.load(launch.kernel, from_ptx, place, Stream::DEFAULT)?;
        }
        Ok(())
    }
}

/// A tensor on the device. Strides count elements, and sizes and strides that are 0 are taken to be
/// what is needed, save the strides of query, key, value, out and their gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tensor {
    /// Of its first element; 0 where the tensor is absent.
    pub address: u64,
    /// Elements along each dimension.
    pub shape: [usize; 4],
    /// Elements between neighbours along each dimension.
    pub strides: [usize; 4],
}

impl Tensor {
    /// No tensor: of an output, one that is not wanted.
    pub const ABSENT: Tensor = Tensor::flat(0);

    /// A contiguous tensor of the shape that is needed, such as lse or ALiBi's slopes.
    pub const fn flat(address: u64) -> Tensor {
        Tensor::strided(address, [0; 4], [0; 4])
    }

    /// A contiguous tensor (batch, heads, length, dim).
    ///
    /// ```
    /// use limelight::Tensor;
    ///
    /// let tensor = Tensor::contiguous(0x1000, [2, 8, 100, 64]);
    /// assert_eq!(tensor.strides, [51200, 6400, 64, 1]);
    /// ```
    pub const fn contiguous(address: u64, shape: [usize; 4]) -> Tensor {
        let [_, heads, length, dim] = shape;
        Tensor::strided(address, shape, [heads * length * dim, length * dim, dim, 1])
    }

    /// Any layout; the strides are those of batch, heads, length and dim.
    pub const fn strided(address: u64, shape: [usize; 4], strides: [usize; 4]) -> Tensor {
        Tensor {
            address,
            shape,
            strides,
        }
    }
}

/// The tensors of a forward.
#[derive(Clone, Copy, Debug, Default)]
pub struct Forward<'a> {
    /// (batch, q_heads, q_len, head_dim).
    pub query: Tensor,
    /// (batch, kv_heads, kv_len, head_dim).
    pub key: Tensor,
    /// (batch, kv_heads, kv_len, value_dim).
    pub value: Tensor,
    /// (q_heads) float32, of a key that has no value; may be absent.
    pub sinks: Tensor,
    /// In the order of the manifest, such as the lengths of "key_lengths", (batch) int64.
    pub mask_tensors: &'a [Tensor],
    /// In the order of the manifest, such as the slopes of "alibi", (q_heads) float32.
    pub bias_tensors: &'a [Tensor],
    /// (batch, q_heads, q_len, value_dim); of a forward written, of a backward read.
    pub out: Tensor,
    /// (batch, q_heads, q_len) float32, the logarithm of the softmax's sum; of a forward written
    /// unless absent, of a backward read.
    pub lse: Tensor,
}

/// The tensors of a backward. Its outputs, the gradients from `d_query` on, may each be absent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backward<'a> {
    /// Those of the forward, out and lse among them.
    pub forward: Forward<'a>,
    /// The gradient of out.
    pub d_out: Tensor,
    /// The gradient of lse; may be absent.
    pub d_lse: Tensor,
    /// The gradient of query.
    pub d_query: Tensor,
    /// The gradient of key.
    pub d_key: Tensor,
    /// The gradient of value.
    pub d_value: Tensor,
    /// The gradient of the sinks, float32.
    pub d_sinks: Tensor,
    /// The gradients of the bias's tensors, with [`Problem::bias_gradients`].
    pub d_bias_tensors: &'a [Tensor],
}

impl<'a> Backward<'a> {
    fn of(forward: &Forward<'a>) -> Backward<'a> {
        Backward {
            forward: *forward,
            ..Backward::default()
        }
    }
}

/// Memory on the device that a call may use until its work is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// A multiple of 256.
    pub address: u64,
    /// How much there is.
    pub bytes: usize,
}

impl Workspace {
    /// For calls that need none.
    pub const NONE: Workspace = Workspace {
        address: 0,
        bytes: 0,
    };
}

/// A `CUstream` or `cudaStream_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(usize);

impl Stream {
    /// The default stream.
    pub const DEFAULT: Stream = Stream(0);

    /// From the driver's handle.
    pub fn from_raw(stream: *mut c_void) -> Stream {
        Stream(stream as usize)
    }

    fn raw(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}

/// What decides which of the kernels a GPU can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its compute capability: 86 of an sm_86.
    pub capability: u32,
    /// The bytes of shared memory that a block may ask for.
    pub shared: u32,
}

impl Gpu {
    /// That of the current context.
    pub fn current() -> Result<Gpu, Error> {
        Ok(driver::driver()?.place()?.gpu)
    }
}

/// One kernel with its arguments: what [`Problem::plan_forward`] makes, for other loaders.
///
/// Everything lies along x: a grid of `grid()` blocks of `threads()` threads. Over 48 KiB of shared
/// memory, the function's `MAX_DYNAMIC_SHARED_SIZE_BYTES` must be set first.
#[derive(Clone, Debug)]
pub struct Launch {
    kernel: usize,
    from_ptx: bool,
    grid: u32,
    arguments: Vec<u64>,
}

impl Launch {
    /// Of the kernel, different from every other's: a key for what is loaded.
    pub fn name(&self) -> &'static str {
        tables::KERNELS[self.kernel].name
    }

    /// The function's name in the code.
    pub fn entry(&self) -> &'static str {
        tables::KERNELS[self.kernel].entry
    }

    /// The kernel as text that a driver assembles.
    pub fn ptx(&self) -> &'static str {
        tables::KERNELS[self.kernel].ptx.trim_end_matches('\0')
    }

    /// The kernel as machine code, unless the GPU has to take the PTX.
    pub fn cubin(&self) -> Option<&'static [u8]> {
        (!self.from_ptx).then(|| &tables::KERNELS[self.kernel].cubin.0)
    }

    /// Blocks.
    pub fn grid(&self) -> u32 {
        self.grid
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        tables::KERNELS[self.kernel].threads
    }

    /// Bytes of dynamic shared memory of a block.
    pub fn shared(&self) -> u32 {
        tables::KERNELS[self.kernel].shared
    }

    /// One for each of the kernel's parameters, its value in the first bytes: of an i32 or a float
    /// four, of an address or an i64 all eight.
    pub fn arguments(&self) -> &[u64] {
        &self.arguments
    }

    /// What `cuLaunchKernel` takes: for each parameter the address of its value, valid as long as
    /// this launch is neither moved nor changed.
    pub fn argument_pointers(&mut self) -> Vec<*mut c_void> {
        let arguments = self.arguments.iter_mut();
        arguments
            .map(|each| std::ptr::from_mut(each).cast())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(found: Result<Vec<Launch>, Error>, wanted: &str) {
        let message = found.map(|_| ()).unwrap_err().to_string();
        assert!(message.contains(wanted), "{message}");
    }

    #[test]
    fn every_variant_is_chosen_for_its_own_gpu() {
        for variant in tables::VARIANTS {
            let problem = Problem {
                value_dim: Some(variant.value_dim),
                mask: variant.mask,
                bias: variant.bias,
                bias_gradients: variant.bias_gradients,
                softcap: variant.softcap.then_some(30.0),
                ..Problem::new(variant.dtype, variant.head_dim)
            };
            let shared = 227 * 1024;
            let gpu = Gpu {
                capability: variant.target,
                shared,
            };
            let (chosen, from_ptx) = plan::choose(&problem, variant.operation, gpu).unwrap();
            assert!(std::ptr::eq(chosen, variant) && !from_ptx);
            let later = Gpu {
                capability: variant.target + 1,
                shared,
            };
            if let Ok((chosen, from_ptx)) = plan::choose(&problem, variant.operation, later) {
                assert!(chosen.portable || chosen.target == later.capability);
                assert!(!from_ptx || chosen.target / 10 < later.capability / 10);
            }
        }
    }

    #[test]
    fn problems_that_no_kernel_takes() {
        let gpu = Gpu {
            capability: 80,
            shared: 0,
        };
        let plan =
            |problem: Problem| problem.plan_forward(&Forward::default(), Workspace::NONE, gpu);
        let first = &tables::VARIANTS[0];
        let known = Problem {
            value_dim: Some(first.value_dim),
            mask: first.mask,
            bias: first.bias,
            softcap: first.softcap.then_some(30.0),
            ..Problem::new(first.dtype, first.head_dim)
        };
        check(plan(known), "0 bytes of shared memory");
        let other = Problem {
            head_dim: 7,
            ..known
        };
        check(plan(other), "head_dim: found 7");
    }

    #[test]
    fn code_is_where_a_driver_can_read_it() {
        for kernel in tables::KERNELS {
            assert_eq!(kernel.cubin.0.as_ptr() as usize % 16, 0);
            assert!(kernel.ptx.ends_with('\0'));
        }
    }
}
