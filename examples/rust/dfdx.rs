//! limelight's PTX as dfdx loads its own: for an operation inside dfdx, whose tensors give their
//! buffers (`tensor.data`) and their device (`self.dev` of `Cuda`) to its own modules only.
//!
//! `CudaDevice::load_ptx` and `CudaFunction::launch` of the cudarc that dfdx uses pass at most twelve
//! arguments, and these kernels take more than forty: `run` is the same one layer below, with
//! `cudarc::driver::result`. (From cudarc 0.11 on, `launch` takes `&mut argument_pointers()` too.)
//!
//!     [dependencies]
//!     limelight = { path = "kernels" } # what `limelight export` wrote
//!     cudarc = { version = "0.9.15", features = ["f16"] }
//!     half = "2"
//!
//! Written against cudarc 0.9.15's published interface, which dfdx 0.13 uses. limelight's tests do
//! not build or run it.

use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::CString;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::CUdevice_attribute_enum::{
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
};
use cudarc::driver::{result, sys, CudaDevice, CudaSlice, DevicePtr, DeviceSlice};
use half::f16;
use limelight::{Backward, DType, Forward, Gpu, Launch, Problem, Tensor, Workspace};

/// The device's, as far as kernels need no permission for their shared memory.
fn gpu(device: &Arc<CudaDevice>) -> Result<Gpu, Box<dyn Error>> {
    let major = device.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = device.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(Gpu {
        capability: u32::try_from(10 * major + minor)?,
        shared: 48 * 1024,
    })
}

/// A function of a module that stays loaded.
#[derive(Clone, Copy)]
struct Loaded(sys::CUfunction);
// SAFETY: the driver's handles belong to no thread.
unsafe impl Send for Loaded {}

/// The kernel's function on the device, loaded once.
fn load(device: &Arc<CudaDevice>, launch: &Launch) -> Result<Loaded, Box<dyn Error>> {
    static LOADED: Mutex<BTreeMap<(usize, &str), Loaded>> = Mutex::new(BTreeMap::new());
    let key = (device.ordinal(), launch.name());
    let mut loaded = LOADED.lock().map_err(|_| "another thread panicked")?;
    if let Some(function) = loaded.get(&key) {
        return Ok(*function);
    }
    let ptx = CString::new(launch.ptx())?;
    // SAFETY: it is PTX with a zero behind it, of which the function is one.
    let function = unsafe {
        let module = result::module::load_data(ptx.as_ptr().cast())?;
        Loaded(result::module::get_function(
            module,
            CString::new(launch.entry())?,
        )?)
    };
    loaded.insert(key, function);
    Ok(function)
}

/// # Safety
/// As of `limelight::Problem::forward`.
unsafe fn run(device: &Arc<CudaDevice>, launches: Vec<Launch>) -> Result<(), Box<dyn Error>> {
    device.bind_to_thread()?;
    for mut launch in launches {
        let function = load(device, &launch)?;
        let (grid, threads) = ((launch.grid(), 1, 1), (launch.threads(), 1, 1));
        let (shared, stream) = (launch.shared(), *device.cu_stream());
        let mut arguments = launch.argument_pointers();
        // SAFETY: the caller's.
        unsafe {
            result::launch_kernel(function.0, grid, threads, shared, stream, &mut arguments)?
        };
    }
    Ok(())
}

/// What the functions below take: a self-attention's batch, heads, length and head_dim.
pub fn problem([batch, heads, length, dim]: [usize; 4]) -> Result<Problem, limelight::Error> {
    Ok(Problem {
        mask: "causal".parse()?,
        bias: "alibi".parse()?,
        bias_gradients: true,
        batch,
        q_heads: heads,
        kv_heads: heads,
        q_len: length,
        kv_len: length,
        from_ptx: true,
        ..Problem::new(DType::Float16, dim)
    })
}

fn contiguous(problem: &Problem, slice: &CudaSlice<f16>) -> Tensor {
    let shape = [
        problem.batch,
        problem.q_heads,
        problem.q_len,
        problem.head_dim,
    ];
    Tensor::contiguous(*slice.device_ptr(), shape)
}

fn flat(slice: &CudaSlice<f32>) -> Tensor {
    Tensor::flat(*slice.device_ptr())
}

/// Out, and the logarithms of the softmax's sums, which the backward needs.
pub fn forward(
    device: &Arc<CudaDevice>,
    problem: &Problem,
    [query, key, value]: [&CudaSlice<f16>; 3],
    slopes: &CudaSlice<f32>,
) -> Result<(CudaSlice<f16>, CudaSlice<f32>), Box<dyn Error>> {
    let gpu = gpu(device)?;
    let rows = problem.batch * problem.q_heads * problem.q_len;
    // SAFETY: the kernels write all of both.
    let (out, lse) = unsafe { (device.alloc(query.len())?, device.alloc(rows)?) };
    let tensors = Forward {
        query: contiguous(problem, query),
        key: contiguous(problem, key),
        value: contiguous(problem, value),
        bias_tensors: &[flat(slopes)],
        out: contiguous(problem, &out),
        lse: flat(&lse),
        ..Forward::default()
    };
    let bytes = problem.plan_forward_workspace(&tensors, gpu)?;
    // SAFETY: the kernels write what they read of it.
    let memory = unsafe { device.alloc::<u8>(bytes.max(1))? };
    let workspace = Workspace {
        address: *memory.device_ptr(),
        bytes,
    };
    // SAFETY: all are live allocations of the device, of these shapes.
    unsafe { run(device, problem.plan_forward(&tensors, workspace, gpu)?)? };
    Ok((out, lse))
}

/// The gradients of query, key and value, and those of the slopes: what the closure that dfdx's
/// `tape.add_backward_op` takes adds to its gradients.
pub fn backward(
    device: &Arc<CudaDevice>,
    problem: &Problem,
    [query, key, value, out, d_out]: [&CudaSlice<f16>; 5],
    [slopes, lse]: [&CudaSlice<f32>; 2],
) -> Result<([CudaSlice<f16>; 3], CudaSlice<f32>), Box<dyn Error>> {
    let gpu = gpu(device)?;
    // SAFETY: the kernels write all of them.
    let (gradients, d_slopes) = unsafe {
        (
            [
                device.alloc(query.len())?,
                device.alloc(key.len())?,
                device.alloc(value.len())?,
            ],
            device.alloc(slopes.len())?,
        )
    };
    let tensors = Backward {
        forward: Forward {
            query: contiguous(problem, query),
            key: contiguous(problem, key),
            value: contiguous(problem, value),
            bias_tensors: &[flat(slopes)],
            out: contiguous(problem, out),
            lse: flat(lse),
            ..Forward::default()
        },
        d_out: contiguous(problem, d_out),
        d_query: contiguous(problem, &gradients[0]),
        d_key: contiguous(problem, &gradients[1]),
        d_value: contiguous(problem, &gradients[2]),
        d_bias_tensors: &[flat(&d_slopes)],
        ..Backward::default()
    };
    let bytes = problem.plan_backward_workspace(&tensors, gpu)?;
    // SAFETY: the kernels write what they read of it.
    let memory = unsafe { device.alloc::<u8>(bytes.max(1))? };
    let workspace = Workspace {
        address: *memory.device_ptr(),
        bytes,
    };
    // SAFETY: all are live allocations of the device, of these shapes.
    unsafe { run(device, problem.plan_backward(&tensors, workspace, gpu)?)? };
    Ok((gradients, d_slopes))
}
