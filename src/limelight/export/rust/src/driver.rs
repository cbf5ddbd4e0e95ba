//! NVIDIA's driver, opened on first use, and what was loaded through it.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void, CStr, CString, OsString};
use std::mem::transmute;
use std::os::unix::ffi::OsStringExt;
use std::ptr::null_mut;
use std::sync::{Mutex, OnceLock, PoisonError, RwLock};

use crate::plan::Kernel;
use crate::tables::KERNELS;
use crate::{Error, Gpu, Launch, Stream};

/// Something of the driver's, which may be used from any thread.
type Handle = *mut c_void;

extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}
const RTLD_NOW: c_int = 2;

// Numbers of the driver.
const COMPUTE_MAJOR: c_int = 75;
const COMPUTE_MINOR: c_int = 76;
const MAX_SHARED: c_int = 97;
const FUNCTION_SHARED: c_int = 8;
const CAPTURE_ELSEWHERE: c_int = 906;

/// What a block has of shared memory without asking.
const FREE_SHARED: u32 = 48 * 1024;

macro_rules! functions {
    ({ $($name:ident: $kind:ty,)* } may_lack { $($newer:ident: $newer_kind:ty,)* }) => {
        #[allow(non_snake_case)]
        pub(crate) struct Driver {
            $($name: $kind,)*
            $($newer: Option<$newer_kind>,)*
        }

        impl Driver {
            /// # Safety
            /// The library is the CUDA driver: its functions have these types.
            unsafe fn of(library: *mut c_void, path: &str) -> Result<Driver, Error> {
                // SAFETY: as above; a null pointer becomes None.
                unsafe {
                    Ok(Driver {
                        $($name: transmute::<*mut c_void, Option<$kind>>(
                            find(library, stringify!($name)),
                        ).ok_or_else(|| {
                            Error::NoDriver(format!("{path} has no {}", stringify!($name)))
                        })?,)*
                        $($newer: transmute::<*mut c_void, Option<$newer_kind>>(
                            find(library, stringify!($newer)),
                        ),)*
                    })
                }
            }
        }
    };
}

functions! {
    {
        cuInit: unsafe extern "C" fn(c_uint) -> c_int,
        cuGetErrorName: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
        cuCtxGetCurrent: unsafe extern "C" fn(*mut Handle) -> c_int,
        cuCtxGetDevice: unsafe extern "C" fn(*mut c_int) -> c_int,
        cuDeviceGetAttribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
        cuStreamIsCapturing: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
        cuModuleLoadData: unsafe extern "C" fn(*mut Handle, *const c_void) -> c_int,
        cuModuleGetFunction: unsafe extern "C" fn(*mut Handle, Handle, *const c_char) -> c_int,
        cuFuncSetAttribute: unsafe extern "C" fn(Handle, c_int, c_int) -> c_int,
        cuLaunchKernel: unsafe extern "C" fn(
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle,
            *mut *mut c_void, *mut *mut c_void,
        ) -> c_int,
    }
    may_lack { // of CUDA 12, without which modules are loaded instead
        cuLibraryLoadData: unsafe extern "C" fn(
            *mut Handle, *const c_void, *mut c_void, *mut c_void, c_uint, *mut c_void,
            *mut c_void, c_uint,
        ) -> c_int,
        cuLibraryGetKernel: unsafe extern "C" fn(*mut Handle, Handle, *const c_char) -> c_int,
        cuKernelGetFunction: unsafe extern "C" fn(*mut Handle, Handle) -> c_int,
        cuCtxGetId: unsafe extern "C" fn(Handle, *mut c_ulonglong) -> c_int,
        cuFuncLoad: unsafe extern "C" fn(Handle) -> c_int,
    }
}

/// # Safety
/// The library is open.
unsafe fn find(library: *mut c_void, name: &str) -> *mut c_void {
    match CString::new(name) {
        // SAFETY: as above, and the name ends with a zero.
        Ok(name) => unsafe { dlsym(library, name.as_ptr()) },
        Err(_) => null_mut(),
    }
}

/// The driver: `libcuda.so.1`, or the library that the variable LIMELIGHT_DRIVER names.
pub(crate) fn driver() -> Result<&'static Driver, Error> {
    static DRIVER: OnceLock<Result<Driver, Error>> = OnceLock::new();
    DRIVER.get_or_init(open).as_ref().map_err(Error::clone)
}

fn open() -> Result<Driver, Error> {
    let path = std::env::var_os("LIMELIGHT_DRIVER").unwrap_or(OsString::from("libcuda.so.1"));
    let shown = path.to_string_lossy().into_owned();
    let path = CString::new(path.into_vec())
        .map_err(|_| Error::NoDriver(format!("{shown}: found a zero in LIMELIGHT_DRIVER")))?;
    // SAFETY: the path ends with a zero, as does what dlerror returns after a failure. Whoever
    // names another library than the driver vouches for it.
    let driver = unsafe {
        let library = dlopen(path.as_ptr(), RTLD_NOW);
        if library.is_null() {
            let why = CStr::from_ptr(dlerror()).to_string_lossy();
            return Err(Error::NoDriver(format!("{why}: NVIDIA's driver is needed")));
        }
        Driver::of(library, &shown)?
    };
    // SAFETY: a call as the driver wants it.
    match unsafe { (driver.cuInit)(0) } {
        0 => Ok(driver),
        code => Err(Error::NoDriver(format!(
            "the CUDA driver does not start: error {code}"
        ))),
    }
}

/// A function in one context.
#[derive(Clone, Copy)]
struct Loaded(Handle);
// SAFETY: the driver's handles belong to no thread.
unsafe impl Send for Loaded {}
// SAFETY: likewise.
unsafe impl Sync for Loaded {}

/// By context, kernel, and whether it is PTX.
static FUNCTIONS: RwLock<BTreeMap<(u64, usize, bool), Loaded>> = RwLock::new(BTreeMap::new());
/// Of CUDA 12, good for all contexts. Whoever loads holds this lock.
static LIBRARIES: Mutex<BTreeMap<(usize, bool), Loaded>> = Mutex::new(BTreeMap::new());

/// Where work runs: the thread's current context.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    context: u64, // its id; a handle may come again when its context has gone
    pub gpu: Gpu,
}

impl Driver {
    fn check(&self, code: c_int, doing: &str) -> Result<(), Error> {
        if code == 0 {
            return Ok(());
        }
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the driver's names are static texts; of an unknown code there is none.
        let name = unsafe {
            (self.cuGetErrorName)(code, &mut name);
            if name.is_null() {
                "an unknown error".into()
            } else {
                CStr::from_ptr(name).to_string_lossy()
            }
        };
        let message = format!("cannot {doing}: {name} ({code})");
        Err(Error::DriverFailed { code, message })
    }

    pub fn place(&self) -> Result<Place, Error> {
        let mut context = null_mut();
        // SAFETY: here and below, the driver writes to live variables of its types.
        let code = unsafe { (self.cuCtxGetCurrent)(&mut context) };
        self.check(code, "read the current context")?;
        if context.is_null() {
            return Err(Error::NoContext);
        }
        let doing = "ask the device what it can do";
        let mut id = context as c_ulonglong;
        if let Some(get_id) = self.cuCtxGetId {
            // SAFETY: as above.
            self.check(unsafe { get_id(context, &mut id) }, doing)?;
        }
        let mut device = 0;
        // SAFETY: as above.
        self.check(unsafe { (self.cuCtxGetDevice)(&mut device) }, doing)?;
        let ask = |attribute| {
            let mut value = 0;
            // SAFETY: as above.
            let code = unsafe { (self.cuDeviceGetAttribute)(&mut value, attribute, device) };
            self.check(code, doing).map(|()| value as u32)
        };
        let capability = 10 * ask(COMPUTE_MAJOR)? + ask(COMPUTE_MINOR)?;
        let shared = ask(MAX_SHARED)?;
        Ok(Place {
            context: id,
            gpu: Gpu { capability, shared },
        })
    }

    /// Loads it unless that was done already.
    pub fn load(
        &self,
        number: usize,
        from_ptx: bool,
        place: Place,
        stream: Stream,
    ) -> Result<(), Error> {
        self.function(number, from_ptx, place, stream).map(|_| ())
    }

    fn function(
        &self,
        number: usize,
        from_ptx: bool,
        place: Place,
        stream: Stream,
    ) -> Result<Loaded, Error> {
        let key = (place.context, number, from_ptx);
        let found = || {
            let functions = FUNCTIONS.read().unwrap_or_else(PoisonError::into_inner);
            functions.get(&key).copied()
        };
        if let Some(function) = found() {
            return Ok(function);
        }
        let kernel = &KERNELS[number];
        let mut capturing = 0;
        // SAFETY: the caller of the launch vouches for the stream.
        let code = unsafe { (self.cuStreamIsCapturing)(stream.raw(), &mut capturing) };
        if capturing != 0 || code == CAPTURE_ELSEWHERE {
            return Err(Error::Capturing(format!(
                "{} cannot be loaded while a graph is captured: preload it before",
                kernel.entry
            )));
        }
        self.check(code, "ask about the stream")?;

        let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = found() {
            return Ok(function); // loaded by another thread, meanwhile
        }
        let function = self.load_function(kernel, (number, from_ptx), &mut libraries)?;
        FUNCTIONS
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(key, function);
        Ok(function)
    }

    fn load_function(
        &self,
        kernel: &Kernel,
        key: (usize, bool),
        libraries: &mut BTreeMap<(usize, bool), Loaded>,
    ) -> Result<Loaded, Error> {
        let doing = format!("load {}", kernel.name);
        let check = |code| self.check(code, &doing);
        let image: *const c_void = match key.1 {
            true => kernel.ptx.as_ptr().cast(),
            false => kernel.cubin.0.as_ptr().cast(),
        };
        let entry = CString::new(kernel.entry)
            .map_err(|_| Error::NotExported(format!("{}: found a zero", kernel.name)))?;
        let (mut library, mut found, mut function) = (null_mut(), null_mut(), null_mut());
        let by_library = self
            .cuLibraryLoadData
            .zip(self.cuLibraryGetKernel)
            .zip(self.cuKernelGetFunction);
        // SAFETY: the image is whole, PTX with a zero behind it, and static; names end with a
        // zero; the driver writes to live variables of its types.
        unsafe {
            if let Some(((load, get_kernel), get_function)) = by_library {
                if let Some(Loaded(before)) = libraries.get(&key) {
                    library = *before;
                } else {
                    let none = null_mut();
                    check(load(&mut library, image, none, none, 0, none, none, 0))?;
                    libraries.insert(key, Loaded(library));
                }
                check(get_kernel(&mut found, library, entry.as_ptr()))?;
                check(get_function(&mut function, found))?;
            } else {
                check((self.cuModuleLoadData)(&mut library, image))?;
                check((self.cuModuleGetFunction)(
                    &mut function,
                    library,
                    entry.as_ptr(),
                ))?;
            }
            if kernel.shared > FREE_SHARED {
                let shared = kernel.shared as c_int;
                check((self.cuFuncSetAttribute)(function, FUNCTION_SHARED, shared))?;
            }
            if let Some(load) = self.cuFuncLoad {
                check(load(function))?;
            }
        }
        Ok(Loaded(function))
    }

    /// # Safety
    /// The stream is of the current context, which is the place, and the arguments are addresses
    /// that the kernel may read and write.
    pub unsafe fn launch(
        &self,
        launch: &mut Launch,
        place: Place,
        stream: Stream,
    ) -> Result<(), Error> {
        let function = self.function(launch.kernel, launch.from_ptx, place, stream)?;
        let (grid, threads, shared) = (launch.grid(), launch.threads(), launch.shared());
        let doing = format!("launch {}", launch.entry());
        let mut arguments = launch.argument_pointers();
        // SAFETY: there are as many arguments as the kernel has parameters, of their sizes.
        let code = unsafe {
            (self.cuLaunchKernel)(
                function.0,
                grid,
                1,
                1,
                threads,
                1,
                1,
                shared,
                stream.raw(),
                arguments.as_mut_ptr(),
                null_mut(),
            )
        };
        self.check(code, &doing)
    }
}
