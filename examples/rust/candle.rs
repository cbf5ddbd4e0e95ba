//! limelight's attention as an operation of candle with a backward: ALiBi under a causal mask.
//!
//!     [dependencies]
//!     limelight = { path = "kernels" } # what `limelight export` wrote
//!     candle-core = { version = "0.11", features = ["cuda"] }
//!     half = "2"
//!
//! Written against candle 0.11's published interface. limelight's tests do not build or run it.
//!
//!     let slopes = Var::from_tensor(&slopes)?; // (heads) float32
//!     let (out, slope_gradient) = attention(&query, &key, &value, &slopes)?;
//!     let mut gradients = loss(&out)?.backward()?;
//!     slope_gradient.insert_into(&mut gradients, &slopes);

use std::sync::{Arc, Mutex};

use candle_core::backend::BackendStorage;
use candle_core::backprop::GradStore;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr,
};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp3, DType, Error, Layout, Result, Shape, Storage, Tensor,
};
use half::f16;
use limelight::{Backward, Forward, Problem, Stream, Workspace};

/// softmax(query key^T / sqrt(dim) + ALiBi, causal) value, of (batch, heads, length, dim) float16
/// tensors in any layout whose last stride is 1. slopes: (heads) float32.
pub fn attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    slopes: &Tensor,
) -> Result<(Tensor, SlopeGradient)> {
    let gradient = SlopeGradient::default();
    let operation = Attention {
        slopes: slopes.clone(),
        lse: Mutex::default(),
        d_slopes: gradient.clone(),
    };
    Ok((query.apply_op3(key, value, operation)?, gradient))
}

/// Of the slopes, once `backward` has run: an operation has three arguments in candle, and the
/// slopes are not among them.
#[derive(Clone, Default)]
pub struct SlopeGradient(Arc<Mutex<Option<Tensor>>>);

impl SlopeGradient {
    pub fn insert_into(&self, gradients: &mut GradStore, slopes: &Tensor) {
        if let Some(gradient) = self.0.lock().expect("no panic in backward").take() {
            gradients.insert(slopes, gradient);
        }
    }
}

struct Attention {
    slopes: Tensor,
    lse: Mutex<Option<CudaSlice<f32>>>, // an operation has one result: kept here for the backward
    d_slopes: SlopeGradient,
}

impl Attention {
    fn problem(&self, query: &Shape, key: &Shape) -> Result<Problem> {
        let (batch, q_heads, q_len, dim) = query.dims4()?;
        let (_, kv_heads, kv_len, _) = key.dims4()?;
        Ok(Problem {
            mask: "causal".parse().map_err(Error::wrap)?,
            bias: "alibi".parse().map_err(Error::wrap)?,
            bias_gradients: true,
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            query_start: kv_len as i64 - q_len as i64, // the last query sees all keys
            ..Problem::new(limelight::DType::Float16, dim)
        })
    }
}

// candle does all work of a device on one stream, so that what an address is of need not be held
// until the stream is done: cudarc frees in the stream's order.

fn place(storage: &CudaStorage, layout: &Layout, stream: &CudaStream) -> Result<limelight::Tensor> {
    let slice = storage.as_cuda_slice::<f16>()?;
    let (address, _) = slice.slice(layout.start_offset()..).device_ptr(stream);
    let (batch, heads, length, dim) = layout.shape().dims4()?;
    let &[of_batch, of_heads, of_length, of_dim] = layout.stride() else {
        bail!("four dimensions have four strides")
    };
    let strides = [of_batch, of_heads, of_length, of_dim];
    Ok(limelight::Tensor::strided(
        address,
        [batch, heads, length, dim],
        strides,
    ))
}

fn place_of(tensor: &Tensor, stream: &CudaStream) -> Result<limelight::Tensor> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => place(storage, layout, stream),
        _ => bail!("limelight needs tensors on a CUDA device"),
    }
}

/// Of a contiguous tensor.
fn address<T: CudaDType + DeviceRepr>(tensor: &Tensor, stream: &CudaStream) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) if layout.is_contiguous() => {
            let slice = storage.as_cuda_slice::<T>()?;
            Ok(slice.slice(layout.start_offset()..).device_ptr(stream).0)
        }
        _ => bail!("limelight needs a contiguous tensor on a CUDA device"),
    }
}

fn raw(stream: &CudaStream) -> Stream {
    Stream::from_raw(stream.cu_stream().cast())
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "limelight"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("limelight's kernels need a GPU")
    }

    fn cuda_fwd(
        &self,
        query: &CudaStorage,
        query_layout: &Layout,
        key: &CudaStorage,
        key_layout: &Layout,
        value: &CudaStorage,
        value_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let device = query.device().clone();
        let stream = device.cuda_stream();
        stream.context().bind_to_thread().w()?;
        let problem = self.problem(query_layout.shape(), key_layout.shape())?;
        let shape = [
            problem.batch,
            problem.q_heads,
            problem.q_len,
            problem.head_dim,
        ];
        // SAFETY: the kernels write all of both.
        let (mut out, mut lse) = unsafe {
            (
                device.alloc::<f16>(shape.iter().product())?,
                device.alloc::<f32>(shape[..3].iter().product())?,
            )
        };
        let slopes = [limelight::Tensor::flat(address::<f32>(
            &self.slopes,
            &stream,
        )?)];
        let tensors = Forward {
            query: place(query, query_layout, &stream)?,
            key: place(key, key_layout, &stream)?,
            value: place(value, value_layout, &stream)?,
            bias_tensors: &slopes,
            out: limelight::Tensor::contiguous(out.device_ptr_mut(&stream).0, shape),
            lse: limelight::Tensor::flat(lse.device_ptr_mut(&stream).0),
            ..Forward::default()
        };
        let bytes = problem.forward_workspace(&tensors).map_err(Error::wrap)?;
        // SAFETY: the kernels write what they read of it.
        let mut memory = unsafe { device.alloc::<u8>(bytes.max(1))? };
        let address = memory.device_ptr_mut(&stream).0;
        // SAFETY: all are live allocations of the stream's context, of these shapes.
        unsafe { problem.forward(&tensors, Workspace { address, bytes }, raw(&stream)) }
            .map_err(Error::wrap)?;
        *self.lse.lock().expect("no panic in a forward") = Some(lse);
        Ok((
            CudaStorage::wrap_cuda_slice(out, device),
            Shape::from(shape.to_vec()),
        ))
    }

    fn bwd(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let device = query.device().as_cuda_device()?;
        let stream = device.cuda_stream();
        stream.context().bind_to_thread().w()?;
        let lse = self.lse.lock().expect("no panic in a forward");
        let Some(lse) = lse.as_ref() else {
            bail!("limelight: a backward without its forward")
        };
        let problem = self.problem(query.shape(), key.shape())?;
        let d_out = d_out.contiguous()?; // of a sum, it has strides of 0
        let zeros = |like: &Tensor| Tensor::zeros(like.shape(), like.dtype(), like.device());
        let (d_query, d_key, d_value) = (zeros(query)?, zeros(key)?, zeros(value)?);
        let d_slopes = Tensor::zeros(self.slopes.shape(), DType::F32, query.device())?;
        let slopes = [limelight::Tensor::flat(address::<f32>(
            &self.slopes,
            &stream,
        )?)];
        let of_slopes = [limelight::Tensor::flat(address::<f32>(&d_slopes, &stream)?)];
        let tensors = Backward {
            forward: Forward {
                query: place_of(query, &stream)?,
                key: place_of(key, &stream)?,
                value: place_of(value, &stream)?,
                bias_tensors: &slopes,
                out: place_of(out, &stream)?,
                lse: limelight::Tensor::flat(lse.device_ptr(&stream).0),
                ..Forward::default()
            },
            d_out: place_of(&d_out, &stream)?,
            d_query: place_of(&d_query, &stream)?,
            d_key: place_of(&d_key, &stream)?,
            d_value: place_of(&d_value, &stream)?,
            d_bias_tensors: &of_slopes,
            ..Backward::default()
        };
        let bytes = problem.backward_workspace(&tensors).map_err(Error::wrap)?;
        // SAFETY: the kernels write what they read of it.
        let mut memory = unsafe { device.alloc::<u8>(bytes.max(1))? };
        let address = memory.device_ptr_mut(&stream).0;
        // SAFETY: all are live allocations of the stream's context, of these shapes.
        unsafe { problem.backward(&tensors, Workspace { address, bytes }, raw(&stream)) }
            .map_err(Error::wrap)?;
        *self.d_slopes.0.lock().expect("no panic in backward") = Some(d_slopes);
        Ok((Some(d_query), Some(d_key), Some(d_value)))
    }
}
