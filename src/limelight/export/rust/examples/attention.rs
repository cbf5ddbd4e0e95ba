//! Attention with ALiBi under a causal mask and all its gradients, checked.
//!
//!     limelight export --dtype float16 --head-dim 64 --causal --bias alibi --out kernels
//!     python examples/attention_case.py case
//!     cargo run --release --example attention --manifest-path kernels/Cargo.toml -- case
//!
//! A second argument, such as 75, takes the kernels of sm_75 instead of those that suit the GPU; a
//! third, `ptx`, has the driver assemble them from PTX. A program of yours gets its context and its
//! tensors from another crate; the few calls of the driver that this one makes are declared below.

use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use limelight::{Backward, DType, Forward, Problem, Stream, Tensor, Workspace};

type Failure = Box<dyn std::error::Error>;

extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// The first device's context, current in this thread.
struct Cuda {
    library: *mut c_void,
}

impl Cuda {
    fn start() -> Result<Cuda, Failure> {
        // SAFETY: calls as the driver wants them.
        unsafe {
            let library = dlopen(c"libcuda.so.1".as_ptr(), 2);
            if library.is_null() {
                return Err("libcuda.so.1 cannot be opened".into());
            }
            let cuda = Cuda { library };
            let (mut device, mut context) = (0, std::ptr::null_mut::<c_void>());
            let init: unsafe extern "C" fn(c_uint) -> c_int = cuda.find(c"cuInit")?;
            check(init(0), "start CUDA")?;
            let get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int =
                cuda.find(c"cuDeviceGet")?;
            check(get(&mut device, 0), "find a device")?;
            let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int =
                cuda.find(c"cuDevicePrimaryCtxRetain")?;
            check(retain(&mut context, device), "make a context")?;
            let set: unsafe extern "C" fn(*mut c_void) -> c_int = cuda.find(c"cuCtxSetCurrent")?;
            check(set(context), "use the context")?;
            Ok(cuda)
        }
    }

    /// # Safety
    /// The driver's function has the type.
    unsafe fn find<F: Copy>(&self, name: &CStr) -> Result<F, Failure> {
        // SAFETY: the library is open; a function's address is as large as F, which the caller
        // vouches for.
        unsafe {
            let found = dlsym(self.library, name.as_ptr());
            if found.is_null() {
                return Err(format!("{name:?} is not in the driver").into());
            }
            assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
            Ok(std::mem::transmute_copy(&found))
        }
    }

    fn allocate(&self, bytes: usize) -> Result<u64, Failure> {
        let mut address = 0;
        // SAFETY: a call as the driver wants it.
        unsafe {
            let allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int =
                self.find(c"cuMemAlloc_v2")?;
            check(allocate(&mut address, bytes), "allocate")?;
        }
        Ok(address)
    }

    fn upload(&self, bytes: &[u8]) -> Result<u64, Failure> {
        let address = self.allocate(bytes.len())?;
        // SAFETY: both are as large as is said.
        unsafe {
            let copy: unsafe extern "C" fn(u64, *const c_void, usize) -> c_int =
                self.find(c"cuMemcpyHtoD_v2")?;
            check(copy(address, bytes.as_ptr().cast(), bytes.len()), "upload")?;
        }
        Ok(address)
    }

    fn download(&self, address: u64, size: usize) -> Result<Vec<u8>, Failure> {
        let mut bytes = vec![0; size];
        // SAFETY: both are as large as is said. The copy waits for the kernels.
        unsafe {
            let copy: unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int =
                self.find(c"cuMemcpyDtoH_v2")?;
            check(copy(bytes.as_mut_ptr().cast(), address, size), "download")?;
        }
        Ok(bytes)
    }
}

fn check(code: c_int, doing: &str) -> Result<(), Failure> {
    match code {
        0 => Ok(()),
        _ => Err(format!("cannot {doing}: CUDA error {code}").into()),
    }
}

fn read(folder: &Path, file: &str) -> Result<Vec<u8>, Failure> {
    let path = folder.join(file);
    std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()).into())
}

fn from_half(half: u16) -> f32 {
    let (exponent, fraction) = (i32::from(half >> 10 & 31), f32::from(half & 1023));
    let size = match exponent {
        0 => fraction * 2_f32.powi(-24),
        31 => f32::INFINITY,
        _ => (1024.0 + fraction) * 2_f32.powi(exponent - 25),
    };
    if half & 0x8000 == 0 {
        size
    } else {
        -size
    }
}

/// |found - expected| / |expected|, of a result on the device.
fn error(cuda: &Cuda, address: u64, half: bool, expected: &[u8]) -> Result<f64, Failure> {
    let single = |four: &[u8]| f32::from_le_bytes([four[0], four[1], four[2], four[3]]);
    let expected: Vec<f32> = expected.chunks_exact(4).map(single).collect();
    let found: Vec<f32> = if half {
        let bytes = cuda.download(address, 2 * expected.len())?;
        let halves = bytes.chunks_exact(2);
        halves
            .map(|two| from_half(u16::from_le_bytes([two[0], two[1]])))
            .collect()
    } else {
        let bytes = cuda.download(address, 4 * expected.len())?;
        bytes.chunks_exact(4).map(single).collect()
    };
    let (mut wrong, mut whole) = (0.0, 0.0);
    for (found, expected) in found.into_iter().zip(expected) {
        wrong += f64::from(found - expected).powi(2);
        whole += f64::from(expected).powi(2);
    }
    Ok((wrong / whole).sqrt())
}

/// Whether every result is right.
fn run(case: &Path, target: Option<u32>, from_ptx: bool) -> Result<bool, Failure> {
    let sizes = String::from_utf8(read(case, "sizes.txt")?)?;
    let size = |wanted: &str| -> Result<usize, Failure> {
        let line = sizes.lines().find_map(|line| line.strip_prefix(wanted));
        Ok(line
            .ok_or(format!("sizes.txt has no {wanted}"))?
            .trim()
            .parse()?)
    };
    let (batch, q_heads, kv_heads) = (size("batch")?, size("q_heads")?, size("kv_heads")?);
    let (q_len, kv_len, dim) = (size("q_len")?, size("kv_len")?, size("head_dim")?);
    let problem = Problem {
        mask: "causal".parse()?,
        bias: "alibi".parse()?,
        bias_gradients: true,
        batch,
        q_heads,
        kv_heads,
        q_len,
        kv_len,
        query_start: i64::try_from(kv_len)? - i64::try_from(q_len)?, // the last query sees all keys
        target,
        from_ptx,
        ..Problem::new(DType::Float16, dim)
    };

    let cuda = Cuda::start()?;
    let load = |name: &str| cuda.upload(&read(case, &format!("{name}.bin"))?);
    // (batch, length, heads, dim) in memory.
    let tensor = |address, heads, length| {
        let strides = [length * heads * dim, dim, heads * dim, 1];
        Tensor::strided(address, [batch, heads, length, dim], strides)
    };
    let of_queries = 2 * batch * q_heads * q_len * dim;
    let of_keys = 2 * batch * kv_heads * kv_len * dim;
    let slopes = [Tensor::flat(load("slopes")?)];
    let forward = Forward {
        query: tensor(load("query")?, q_heads, q_len),
        key: tensor(load("key")?, kv_heads, kv_len),
        value: tensor(load("value")?, kv_heads, kv_len),
        bias_tensors: &slopes,
        out: tensor(cuda.allocate(of_queries)?, q_heads, q_len),
        lse: Tensor::flat(cuda.allocate(4 * batch * q_heads * q_len)?),
        ..Forward::default()
    };
    // SAFETY: every address is of an allocation of the size that is needed.
    unsafe { problem.forward(&forward, Workspace::NONE, Stream::DEFAULT)? };

    let d_slopes = [Tensor::flat(cuda.allocate(4 * q_heads)?)];
    let backward = Backward {
        forward,
        d_out: tensor(load("d_out")?, q_heads, q_len),
        d_lse: Tensor::flat(load("d_lse")?),
        d_query: tensor(cuda.allocate(of_queries)?, q_heads, q_len),
        d_key: tensor(cuda.allocate(of_keys)?, kv_heads, kv_len),
        d_value: tensor(cuda.allocate(of_keys)?, kv_heads, kv_len),
        d_bias_tensors: &d_slopes,
        ..Backward::default()
    };
    let bytes = problem.backward_workspace(&backward)?;
    let workspace = Workspace {
        address: cuda.allocate(bytes)?,
        bytes,
    };
    // SAFETY: as above.
    unsafe { problem.backward(&backward, workspace, Stream::DEFAULT)? };

    let results = [
        ("out", forward.out, true),
        ("lse", forward.lse, false),
        ("d_query", backward.d_query, true),
        ("d_key", backward.d_key, true),
        ("d_value", backward.d_value, true),
        ("d_slopes", d_slopes[0], false),
    ];
    let mut right = true;
    for (name, result, half) in results {
        let expected = read(case, &format!("expected_{name}.bin"))?;
        let error = error(&cuda, result.address, half, &expected)?;
        println!("{name:10} {error:.1e}");
        right &= error < 2e-3; // false for NaN too
    }
    Ok(right)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let Some(case) = arguments.get(1).map(PathBuf::from) else {
        eprintln!("usage: attention CASE [TARGET [ptx]]");
        return ExitCode::FAILURE;
    };
    let target = arguments.get(2).and_then(|text| text.parse().ok());
    let from_ptx = arguments.get(3).is_some_and(|text| text == "ptx");
    match run(&case, target, from_ptx) {
        Ok(right) => {
            println!("{}", if right { "right" } else { "wrong" });
            ExitCode::from(u8::from(!right))
        }
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}
