use std::fmt;

/// What went wrong. Nothing was launched, save where the driver refused a later launch than the
/// first ([`Error::DriverFailed`]).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// No output has an element: nothing was launched. You may well ignore it.
    Empty,
    /// `libcuda.so.1` is not there, or does not start.
    NoDriver(String),
    /// No context is current in this thread.
    NoContext,
    /// A call of the driver failed.
    DriverFailed {
        /// The driver's own number, a `CUresult`.
        code: i32,
        /// What was tried, and the number's name.
        message: String,
    },
    /// The export has no such dtype, mask, bias or operation.
    NotExported(String),
    /// The export has no such head_dim.
    WrongHeadDim(String),
    /// Nothing in the export runs on the GPU.
    WrongArchitecture(String),
    /// A size is too large, or heads do not divide, or a tensor has another shape.
    WrongSize(String),
    /// The scale or the softcap.
    WrongNumber(String),
    /// A stride that the kernels cannot take.
    WrongStride(String),
    /// An address.
    NotAligned(String),
    /// A tensor that is needed is not given.
    NullPointer(String),
    /// The workspace is smaller than needed.
    SmallWorkspace {
        /// The bytes that were given.
        bytes: usize,
        /// Where they are.
        address: u64,
        /// The bytes that are needed.
        needed: usize,
    },
    /// A graph is captured, and the kernels were not loaded before.
    Capturing(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Empty => f.write_str("no output has an element: nothing was launched"),
            Error::NoContext => {
                f.write_str("no context is current in this thread: make one so first")
            }
            Error::SmallWorkspace {
                bytes,
                address,
                needed,
            } => {
                write!(
                    f,
                    "workspace: found {bytes} bytes at {address:#x}, needed {needed}"
                )
            }
            Error::NoDriver(message)
            | Error::DriverFailed { message, .. }
            | Error::NotExported(message)
            | Error::WrongHeadDim(message)
            | Error::WrongArchitecture(message)
            | Error::WrongSize(message)
            | Error::WrongNumber(message)
            | Error::WrongStride(message)
            | Error::NotAligned(message)
            | Error::NullPointer(message)
            | Error::Capturing(message) => f.write_str(message),
        }
    }
}

impl std::error::Error for Error {}
