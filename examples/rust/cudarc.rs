//! limelight's attention on cudarc's buffers: ALiBi under a causal mask, forward and backward.
//!
//!     [dependencies]
//!     limelight = { path = "kernels" } # what `limelight export` wrote
//!     cudarc = { version = "0.19", features = ["f16"] }
//!     half = "2"
//!
//! Written against cudarc 0.19's published interface. limelight's tests do not build or run it.

use std::error::Error;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use half::f16;
use limelight::{Backward, DType, Forward, Launch, Problem, Stream, Tensor, Workspace};

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
        ..Problem::new(DType::Float16, dim)
    })
}

fn shape(problem: &Problem) -> [usize; 4] {
    [
        problem.batch,
        problem.q_heads,
        problem.q_len,
        problem.head_dim,
    ]
}

fn raw(stream: &CudaStream) -> Stream {
    Stream::from_raw(stream.cu_stream().cast())
}

/// Memory for the workspace; cudarc does not allocate nothing.
fn memory(stream: &Arc<CudaStream>, bytes: usize) -> Result<CudaSlice<u8>, Box<dyn Error>> {
    // SAFETY: the kernels write what they read of it.
    Ok(unsafe { stream.alloc(bytes.max(1))? })
}

/// Out, and the logarithms of the softmax's sums, which the backward needs.
pub fn forward(
    stream: &Arc<CudaStream>,
    problem: &Problem,
    [query, key, value]: [&CudaSlice<f16>; 3],
    slopes: &CudaSlice<f32>,
) -> Result<(CudaSlice<f16>, CudaSlice<f32>), Box<dyn Error>> {
    stream.context().bind_to_thread()?;
    let shape = shape(problem);
    let rows = shape[..3].iter().product();
    // SAFETY: the kernels write all of both.
    let (mut out, mut lse) = unsafe { (stream.alloc(query.len())?, stream.alloc(rows)?) };
    {
        // What is named with an underscore tells cudarc, when it goes, that the stream used these.
        let (query, _query) = query.device_ptr(stream);
        let (key, _key) = key.device_ptr(stream);
        let (value, _value) = value.device_ptr(stream);
        let (slopes, _slopes) = slopes.device_ptr(stream);
        let (out, _out) = out.device_ptr_mut(stream);
        let (lse, _lse) = lse.device_ptr_mut(stream);
        let tensors = Forward {
            query: Tensor::contiguous(query, shape),
            key: Tensor::contiguous(key, shape),
            value: Tensor::contiguous(value, shape),
            bias_tensors: &[Tensor::flat(slopes)],
            out: Tensor::contiguous(out, shape),
            lse: Tensor::flat(lse),
            ..Forward::default()
        };
        let bytes = problem.forward_workspace(&tensors)?;
        let mut memory = memory(stream, bytes)?;
        let (address, _memory) = memory.device_ptr_mut(stream);
        // SAFETY: all are live allocations of the stream's context, of these shapes.
        unsafe { problem.forward(&tensors, Workspace { address, bytes }, raw(stream))? };
    }
    Ok((out, lse))
}

/// The gradients of query, key and value, and those of the slopes.
pub fn backward(
    stream: &Arc<CudaStream>,
    problem: &Problem,
    [query, key, value, out, d_out]: [&CudaSlice<f16>; 5],
    [slopes, lse]: [&CudaSlice<f32>; 2],
) -> Result<([CudaSlice<f16>; 3], CudaSlice<f32>), Box<dyn Error>> {
    stream.context().bind_to_thread()?;
    let shape = shape(problem);
    // SAFETY: the kernels write all of them.
    let (mut d_query, mut d_key, mut d_value, mut d_slopes) = unsafe {
        (
            stream.alloc(query.len())?,
            stream.alloc(key.len())?,
            stream.alloc(value.len())?,
            stream.alloc(slopes.len())?,
        )
    };
    {
        let (query, _query) = query.device_ptr(stream);
        let (key, _key) = key.device_ptr(stream);
        let (value, _value) = value.device_ptr(stream);
        let (slopes, _slopes) = slopes.device_ptr(stream);
        let (out, _out) = out.device_ptr(stream);
        let (lse, _lse) = lse.device_ptr(stream);
        let (d_out, _d_out) = d_out.device_ptr(stream);
        let (d_query, _d_query) = d_query.device_ptr_mut(stream);
        let (d_key, _d_key) = d_key.device_ptr_mut(stream);
        let (d_value, _d_value) = d_value.device_ptr_mut(stream);
        let (d_slopes, _d_slopes) = d_slopes.device_ptr_mut(stream);
        let tensors = Backward {
            forward: Forward {
                query: Tensor::contiguous(query, shape),
                key: Tensor::contiguous(key, shape),
                value: Tensor::contiguous(value, shape),
                bias_tensors: &[Tensor::flat(slopes)],
                out: Tensor::contiguous(out, shape),
                lse: Tensor::flat(lse),
                ..Forward::default()
            },
            d_out: Tensor::contiguous(d_out, shape),
            d_query: Tensor::contiguous(d_query, shape),
            d_key: Tensor::contiguous(d_key, shape),
            d_value: Tensor::contiguous(d_value, shape),
            d_bias_tensors: &[Tensor::flat(d_slopes)],
            ..Backward::default()
        };
        let bytes = problem.backward_workspace(&tensors)?;
        let mut memory = memory(stream, bytes)?;
        let (address, _memory) = memory.device_ptr_mut(stream);
        // SAFETY: all are live allocations of the stream's context, of these shapes.
        unsafe { problem.backward(&tensors, Workspace { address, bytes }, raw(stream))? };
    }
    Ok(([d_query, d_key, d_value], d_slopes))
}

/// For programs that would rather launch by cudarc: what `Problem::plan_forward` returned.
///
/// # Safety
/// As of `Problem::forward`.
pub unsafe fn launch_by_cudarc(
    stream: &Arc<CudaStream>,
    launches: &[Launch],
) -> Result<(), Box<dyn Error>> {
    for launch in launches {
        // Keep the modules, by `launch.name()`: each is assembled when it is loaded.
        let module = stream.context().load_module(Ptx::from_src(launch.ptx()))?;
        let function = module.load_function(launch.entry())?;
        let mut builder = stream.launch_builder(&function);
        for argument in launch.arguments() {
            builder.arg(argument);
        }
        let config = LaunchConfig {
            grid_dim: (launch.grid(), 1, 1),
            block_dim: (launch.threads(), 1, 1),
            shared_mem_bytes: launch.shared(), // over 48 KiB, set the function's attribute before
        };
        // SAFETY: the caller's.
        unsafe { builder.launch(config)? };
    }
    Ok(())
}
