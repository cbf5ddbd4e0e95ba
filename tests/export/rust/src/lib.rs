//! An exported crate with the C launcher's functions, so that the C launcher's tests are its tests.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void, CStr, CString};

use limelight::{Backward, Bias, DType, Error, Forward, Mask, Problem, Stream, Tensor, Workspace};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CTensor {
    address: u64,
    stride: [i64; 4],
    shape: [i64; 4],
}

/// `limelight_attention`.
#[repr(C)]
pub struct Attention {
    struct_size: usize,
    dtype: c_int,
    head_dim: c_int,
    value_dim: c_int,
    mask: *const c_char,
    bias: *const c_char,
    bias_gradients: c_int,
    batch: i64,
    q_heads: i64,
    kv_heads: i64,
    q_len: i64,
    kv_len: i64,
    query_start: i64,
    scale: f64,
    softcap: f64,
    query: CTensor,
    key: CTensor,
    value: CTensor,
    sinks: CTensor,
    mask_tensors: [CTensor; 4],
    bias_tensors: [CTensor; 4],
    out: CTensor,
    lse: CTensor,
    d_out: CTensor,
    d_lse: CTensor,
    d_query: CTensor,
    d_key: CTensor,
    d_value: CTensor,
    d_sinks: CTensor,
    d_bias_tensors: [CTensor; 4],
    workspace: u64,
    workspace_size: usize,
    stream: *mut c_void,
    target: c_int,
    from_ptx: c_int,
}

const FORWARD: c_int = 0;

const NAMES: [&CStr; 16] = [
    c"SUCCESS",
    c"EMPTY",
    c"NO_DRIVER",
    c"NO_CONTEXT",
    c"DRIVER_FAILED",
    c"NOT_EXPORTED",
    c"WRONG_HEAD_DIM",
    c"WRONG_ARCHITECTURE",
    c"WRONG_SIZE",
    c"WRONG_NUMBER",
    c"WRONG_STRIDE",
    c"NOT_ALIGNED",
    c"NULL_POINTER",
    c"SMALL_WORKSPACE",
    c"CAPTURING",
    c"unknown",
];

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

fn status(result: Result<(), Error>) -> c_int {
    let Err(error) = result else { return 0 };
    MESSAGE.set(CString::new(error.to_string()).expect("no zero in a message"));
    match error {
        Error::Empty => 1,
        Error::NoDriver(_) => 2,
        Error::NoContext => 3,
        Error::DriverFailed { .. } => 4,
        Error::NotExported(_) => 5,
        Error::WrongHeadDim(_) => 6,
        Error::WrongArchitecture(_) => 7,
        Error::WrongSize(_) => 8,
        Error::WrongNumber(_) => 9,
        Error::WrongStride(_) => 10,
        Error::NotAligned(_) => 11,
        Error::NullPointer(_) => 12,
        Error::SmallWorkspace { .. } => 13,
        Error::Capturing(_) => 14,
        _ => 15,
    }
}

#[no_mangle]
pub extern "C" fn limelight_name(status: c_int) -> *const c_char {
    NAMES[status as usize].as_ptr()
}

#[no_mangle]
pub extern "C" fn limelight_message() -> *const c_char {
    MESSAGE.with_borrow(|message| message.as_ptr())
}

/// The kernels are in the crate: there is no folder to open.
///
/// # Safety
/// As in C.
#[no_mangle]
pub unsafe extern "C" fn limelight_open(_: *const c_char, result: *mut *mut c_void) -> c_int {
    *result = std::ptr::dangling_mut();
    0
}

fn tensor(given: &CTensor) -> Tensor {
    let sizes = |of: [i64; 4]| of.map(|size| usize::try_from(size).expect("no negative size"));
    Tensor::strided(given.address, sizes(given.shape), sizes(given.stride))
}

/// Without the absent ones at the end.
fn tensors(given: &[CTensor; 4]) -> Vec<Tensor> {
    let mut all: Vec<Tensor> = given.iter().map(tensor).collect();
    while all.last() == Some(&Tensor::ABSENT) {
        all.pop();
    }
    all
}

unsafe fn text<'a>(given: *const c_char) -> &'a str {
    match given.is_null() {
        true => "none",
        false => CStr::from_ptr(given).to_str().expect("text"),
    }
}

impl Attention {
    unsafe fn problem(&self) -> Result<Problem, Error> {
        let dtype = match self.dtype {
            1 => DType::Float16,
            2 => DType::BFloat16,
            _ => DType::Float32,
        };
        let size = |of: i64| usize::try_from(of).expect("no negative size");
        Ok(Problem {
            value_dim: (self.value_dim != 0).then_some(self.value_dim as usize),
            mask: text(self.mask).parse::<Mask>()?,
            bias: text(self.bias).parse::<Bias>()?,
            bias_gradients: self.bias_gradients != 0,
            batch: size(self.batch),
            q_heads: size(self.q_heads),
            kv_heads: size(self.kv_heads),
            q_len: size(self.q_len),
            kv_len: size(self.kv_len),
            query_start: self.query_start,
            scale: (self.scale != 0.0).then_some(self.scale),
            softcap: (self.softcap != 0.0).then_some(self.softcap),
            target: (self.target != 0).then_some(self.target as u32),
            from_ptx: self.from_ptx != 0,
            ..Problem::new(dtype, self.head_dim as usize)
        })
    }

    fn with<T>(&self, used: impl FnOnce(&Backward) -> T) -> T {
        let mask = tensors(&self.mask_tensors);
        let bias = tensors(&self.bias_tensors);
        let d_bias = tensors(&self.d_bias_tensors);
        let forward = Forward {
            query: tensor(&self.query),
            key: tensor(&self.key),
            value: tensor(&self.value),
            sinks: tensor(&self.sinks),
            mask_tensors: &mask,
            bias_tensors: &bias,
            out: tensor(&self.out),
            lse: tensor(&self.lse),
        };
        used(&Backward {
            forward,
            d_out: tensor(&self.d_out),
            d_lse: tensor(&self.d_lse),
            d_query: tensor(&self.d_query),
            d_key: tensor(&self.d_key),
            d_value: tensor(&self.d_value),
            d_sinks: tensor(&self.d_sinks),
            d_bias_tensors: &d_bias,
        })
    }
}

/// # Safety
/// As in C.
#[no_mangle]
pub unsafe extern "C" fn limelight_launch(
    _: *const c_void,
    operation: c_int,
    attention: &Attention,
) -> c_int {
    let workspace = Workspace {
        address: attention.workspace,
        bytes: attention.workspace_size,
    };
    let stream = Stream::from_raw(attention.stream);
    status(attention.problem().and_then(|problem| {
        attention.with(|tensors| match operation {
            FORWARD => problem.forward(&tensors.forward, workspace, stream),
            _ => problem.backward(tensors, workspace, stream),
        })
    }))
}

/// # Safety
/// As in C.
#[no_mangle]
pub unsafe extern "C" fn limelight_workspace(
    _: *const c_void,
    operation: c_int,
    attention: &Attention,
    bytes: *mut usize,
) -> c_int {
    let found = attention.problem().and_then(|problem| {
        attention.with(|tensors| match operation {
            FORWARD => problem.forward_workspace(&tensors.forward),
            _ => problem.backward_workspace(tensors),
        })
    });
    status(found.map(|found| *bytes = found))
}

/// # Safety
/// As in C.
#[no_mangle]
pub unsafe extern "C" fn limelight_preload(
    _: *const c_void,
    operation: c_int,
    attention: &Attention,
) -> c_int {
    status(attention.problem().and_then(|problem| match operation {
        FORWARD => problem.preload_forward(),
        _ => problem.preload_backward(),
    }))
}
