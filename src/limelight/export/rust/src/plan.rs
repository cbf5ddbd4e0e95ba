//! From a problem and its tensors to launches: chosen, checked, packed. No driver is needed here.

use crate::tables::{
    number, whole, KERNELS, NUMBER_TEXT, VALUES, VARIANTS, WHOLE_TEXT, WORKSPACE_ALIGNMENT,
};
use crate::{Backward, Bias, DType, Error, Gpu, Launch, Mask, Problem, Tensor, Workspace};

/// An index for `whole` or, of a floating-point parameter, for `number`.
pub(crate) type Expression = u16;
/// An index of a value that expressions name.
pub(crate) type Value = u16;

/// The machine code of a cubin where the driver may read it as what it is.
#[repr(C, align(16))]
pub(crate) struct Aligned<Bytes: ?Sized>(pub Bytes);

#[allow(dead_code)] // what an export has decides
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Pointer,
    I32,
    I64,
    U32,
    U64,
    Fp32,
    Fp64,
}

pub(crate) struct Kernel {
    pub name: &'static str,
    pub entry: &'static str,
    pub threads: u32,
    pub shared: u32,
    pub parameters: &'static [(Kind, i64)], // and what it is a multiple of
    pub cubin: &'static Aligned<[u8]>,
    pub ptx: &'static str, // a zero behind it
}

#[allow(dead_code)] // what an export has decides
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Forward,
    Backward,
}

/// Where the caller gives a tensor.
#[allow(dead_code)] // what an export has decides
#[derive(Clone, Copy)]
pub(crate) enum Place {
    Query,
    Key,
    Value,
    Sinks,
    Mask(usize),
    Bias(usize),
    Out,
    Lse,
    DOut,
    DLse,
    DQuery,
    DKey,
    DValue,
    DSinks,
    DBias(usize),
}

/// A dimension; one that is the caller's to choose has a value of its own.
pub(crate) struct Axis {
    pub size: Expression,
    pub free_size: Option<Value>,
    pub stride: Expression,
    pub free_stride: Option<Value>,
}

pub(crate) struct TensorRule {
    pub name: &'static str,
    pub place: Place,
    pub address: Value,
    pub optional: bool,
    pub axes: &'static [Axis],
}

#[allow(dead_code)] // what an export has decides
#[derive(Clone, Copy)]
pub(crate) enum Order {
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
}

pub(crate) struct Condition {
    pub of_numbers: bool,
    pub left: Expression,
    pub order: Order,
    pub right: Expression,
    pub text: &'static str,
}

pub(crate) struct LaunchRule {
    pub kernel: usize,
    pub grid: Expression,
    pub needed_for: &'static [Value],
    pub arguments: &'static [Expression],
}

pub(crate) struct Variant {
    pub operation: Operation,
    pub dtype: DType,
    pub head_dim: usize,
    pub value_dim: usize,
    pub mask: Mask,
    pub bias: Bias,
    pub softcap: bool,
    pub bias_gradients: bool,
    pub target: u32,
    pub portable: bool,
    pub tensors: &'static [TensorRule],
    pub conditions: &'static [Condition],
    pub slices: &'static [(Value, Expression)], // a slice of the workspace, and its bytes
    pub launches: &'static [LaunchRule],
}

/// How well a variant's code suits a GPU: not at all, or more for better, and whether as PTX.
fn suits(variant: &Variant, gpu: Gpu, from_ptx: bool) -> Option<(bool, u32)> {
    let own = variant.target == gpu.capability;
    let fits = |launch: &LaunchRule| KERNELS[launch.kernel].shared <= gpu.shared;
    if !own && (!variant.portable || variant.target > gpu.capability)
        || !variant.launches.iter().all(fits)
    {
        return None;
    }
    let machine_code = own || variant.target / 10 == gpu.capability / 10;
    Some((machine_code && !from_ptx, variant.target))
}

/// The variant, and whether the driver is to assemble its PTX.
pub(crate) fn choose(
    problem: &Problem,
    operation: Operation,
    gpu: Gpu,
) -> Result<(&'static Variant, bool), Error> {
    let value_dim = problem.value_dim.unwrap_or(problem.head_dim);
    let bias_gradients = operation == Operation::Backward && problem.bias_gradients;
    let kind: Vec<&Variant> = VARIANTS
        .iter()
        .filter(|each| {
            each.operation == operation
                && each.dtype == problem.dtype
                && each.mask == problem.mask
                && each.bias == problem.bias
                && each.softcap == problem.softcap.is_some()
                && each.bias_gradients == bias_gradients
        })
        .collect();
    if kind.is_empty() {
        let name = match operation {
            Operation::Forward => "forward",
            Operation::Backward => "backward",
        };
        return Err(Error::NotExported(format!(
            "{name} of {}, mask {}, bias {}{}{}: found none in this export",
            problem.dtype,
            problem.mask,
            problem.bias,
            if problem.softcap.is_some() {
                ", softcap"
            } else {
                ""
            },
            if bias_gradients {
                ", bias_gradients"
            } else {
                ""
            },
        )));
    }
    let mut dims = kind
        .iter()
        .filter(|each| (each.head_dim, each.value_dim) == (problem.head_dim, value_dim))
        .peekable();
    if dims.peek().is_none() {
        return Err(Error::WrongHeadDim(format!(
            "head_dim: found {} (value_dim {value_dim}), which is not in this export",
            problem.head_dim
        )));
    }
    dims.filter(|each| problem.target.map_or(true, |target| each.target == target))
        .filter_map(|each| Some((suits(each, gpu, problem.from_ptx)?, each)))
        .max_by_key(|(suitability, _)| *suitability)
        .map(|((machine_code, _), each)| (*each, !machine_code))
        .ok_or_else(|| {
            let wanted = problem
                .target
                .map_or("any target".to_owned(), |target| format!("sm_{target}"));
            Error::WrongArchitecture(format!(
                "found an sm_{} with {} bytes of shared memory, on which no kernel in this export \
                 for {wanted} runs",
                gpu.capability, gpu.shared
            ))
        })
}

/// Of every name in the tables, for one call.
struct Values {
    whole: [i64; VALUES],
    number: [f64; 2],
}

fn counted(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

impl Values {
    fn evaluate(&self, expression: Expression) -> Result<i64, Error> {
        whole(expression, &self.whole).ok_or_else(|| {
            let text = WHOLE_TEXT[usize::from(expression)];
            Error::WrongSize(format!("{text}: found more than 2^63"))
        })
    }

    fn set(&mut self, value: Value, to: i64) {
        self.whole[usize::from(value)] = to;
    }

    fn of_sizes(problem: &Problem) -> Result<Values, Error> {
        const LAST: i64 = i32::MAX as i64;
        const LAST_START: i64 = 1 << 30;
        // In the order of the first values.
        let sizes = [
            ("batch", counted(problem.batch), 0, LAST),
            ("q_heads", counted(problem.q_heads), 1, LAST),
            ("kv_heads", counted(problem.kv_heads), 1, LAST),
            ("q_len", counted(problem.q_len), 0, LAST),
            ("kv_len", counted(problem.kv_len), 0, LAST),
            ("query_start", problem.query_start, -LAST_START, LAST_START),
        ];
        let scale = problem
            .scale
            .unwrap_or(1.0 / (problem.head_dim as f64).sqrt());
        let softcap = problem.softcap.unwrap_or(0.0);
        let mut values = Values {
            whole: [0; VALUES],
            number: [scale, softcap],
        };
        for (place, (name, found, least, greatest)) in sizes.into_iter().enumerate() {
            if found < least || found > greatest {
                return Err(Error::WrongSize(format!(
                    "{name}: found {found}, needed {least} to {greatest}"
                )));
            }
            values.whole[place] = found;
        }
        if problem.q_heads % problem.kv_heads != 0 {
            return Err(Error::WrongSize(format!(
                "q_heads: found {}, needed a multiple of {} kv_heads",
                problem.q_heads, problem.kv_heads
            )));
        }
        if problem.softcap.is_some() && !(softcap > 0.0 && softcap.is_finite()) {
            return Err(Error::WrongNumber(format!(
                "softcap: found {softcap}, needed a positive number"
            )));
        }
        if !scale.is_finite() {
            return Err(Error::WrongNumber(format!(
                "scale: found {scale}, needed a number"
            )));
        }
        Ok(values)
    }

    /// The sizes that a tensor alone knows.
    fn read_shape(&mut self, rule: &TensorRule, given: Tensor) {
        for (axis, size) in rule.axes.iter().zip(given.shape) {
            if let Some(value) = axis.free_size {
                self.set(value, counted(size));
            }
        }
    }

    fn read_tensor(&mut self, rule: &TensorRule, given: Tensor) -> Result<(), Error> {
        let mut elements = 1_i64;
        // An address is a pattern of bits; whether it is beyond 2^63 does not matter.
        self.set(rule.address, given.address as i64);
        self.read_shape(rule, given);
        for (n, axis) in rule.axes.iter().enumerate() {
            let found = counted(given.shape[n]);
            let size = self.evaluate(axis.size)?;
            if !(0..=i64::from(i32::MAX)).contains(&size) || (found != 0 && found != size) {
                let needed = WHOLE_TEXT[usize::from(axis.size)];
                return Err(Error::WrongSize(format!(
                    "{}.shape.{n}: found {found}, needed {needed}",
                    rule.name
                )));
            }
            elements = elements.saturating_mul(size);
            let found = counted(given.strides[n]);
            match axis.free_stride {
                Some(value) if size == 1 || given.address == 0 => self.set(value, 0),
                Some(value) => self.set(value, found),
                None if found != 0 && size != 1 && found != self.evaluate(axis.stride)? => {
                    let needed = WHOLE_TEXT[usize::from(axis.stride)];
                    return Err(Error::WrongStride(format!(
                        "{}.stride.{n}: found {found}, needed {needed}",
                        rule.name
                    )));
                }
                None => {}
            }
        }
        if given.address == 0 && !rule.optional && elements != 0 {
            return Err(Error::NullPointer(format!(
                "{}: found no address",
                rule.name
            )));
        }
        Ok(())
    }

    fn check_condition(&self, condition: &Condition) -> Result<(), Error> {
        let order = if condition.of_numbers {
            let left = number(condition.left, &self.number);
            left.partial_cmp(&number(condition.right, &self.number))
        } else {
            let left = self.evaluate(condition.left)?;
            Some(left.cmp(&self.evaluate(condition.right)?))
        };
        let holds = order.is_some_and(|order| match condition.order {
            Order::Less => order.is_lt(),
            Order::LessEqual => order.is_le(),
            Order::Greater => order.is_gt(),
            Order::GreaterEqual => order.is_ge(),
        });
        if holds {
            return Ok(());
        }
        let message = format!("found otherwise than needed: {}", condition.text);
        Err(if condition.of_numbers {
            Error::WrongNumber(message)
        } else {
            misfit(condition.text, message)
        })
    }

    /// Places the slices at offsets of the workspace; its size in bytes.
    fn lay_out(&mut self, variant: &Variant) -> Result<usize, Error> {
        let mut offset = 0_i64;
        for &(value, bytes) in variant.slices {
            self.set(value, offset);
            offset = whole(bytes, &self.whole)
                .and_then(|size| size.checked_add(WORKSPACE_ALIGNMENT - 1))
                .map(|size| size / WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT)
                .and_then(|size| offset.checked_add(size))
                .ok_or_else(too_much)?;
        }
        usize::try_from(offset).map_err(|_| too_much())
    }

    fn pack(&self, (kind, multiple_of): (Kind, i64), expression: Expression) -> Result<u64, Error> {
        if let Kind::Fp32 | Kind::Fp64 = kind {
            let found = number(expression, &self.number);
            if let Kind::Fp64 = kind {
                return Ok(found.to_bits());
            }
            let single = found as f32;
            if !single.is_finite() {
                let text = NUMBER_TEXT[usize::from(expression)];
                return Err(Error::WrongNumber(format!(
                    "{text}: found {found:e}, which does not fit a float"
                )));
            }
            return Ok(u64::from(single.to_bits()));
        }
        let found = self.evaluate(expression)?;
        let text = WHOLE_TEXT[usize::from(expression)];
        if found % multiple_of != 0 {
            let needed = format!("needed a multiple of {multiple_of}");
            return Err(match kind {
                Kind::Pointer => Error::NotAligned(format!("{text}: found {found:#x}, {needed}")),
                _ => misfit(text, format!("{text}: found {found}, {needed}")),
            });
        }
        // GPUs, and hosts of theirs, read the low bytes first.
        match kind {
            Kind::I32 => i32::try_from(found).map(|number| u64::from(number as u32)),
            Kind::U32 => u32::try_from(found).map(u64::from),
            _ => Ok(found as u64),
        }
        .map_err(|_| {
            misfit(
                text,
                format!("{text}: found {found}, which does not fit 32 bits"),
            )
        })
    }

    fn launch(&self, rule: &LaunchRule, from_ptx: bool) -> Result<Option<Launch>, Error> {
        let absent = |value: &Value| self.whole[usize::from(*value)] == 0;
        if !rule.needed_for.is_empty() && rule.needed_for.iter().all(absent) {
            return Ok(None);
        }
        let kernel = &KERNELS[rule.kernel];
        let arguments = kernel
            .parameters
            .iter()
            .zip(rule.arguments)
            .map(|(&parameter, &expression)| self.pack(parameter, expression))
            .collect::<Result<_, _>>()?;
        let grid = self.evaluate(rule.grid)?;
        if grid > i64::from(i32::MAX) {
            return Err(Error::WrongSize(format!(
                "{}: found more blocks than a GPU takes",
                WHOLE_TEXT[usize::from(rule.grid)]
            )));
        }
        Ok((grid > 0).then_some(Launch {
            kernel: rule.kernel,
            from_ptx,
            grid: grid as u32,
            arguments,
        }))
    }
}

fn too_much() -> Error {
    Error::WrongSize("the workspace would take more than 2^63 bytes".to_owned())
}

fn misfit(text: &str, message: String) -> Error {
    if text.contains(".stride.") {
        Error::WrongStride(message)
    } else {
        Error::WrongSize(message)
    }
}

fn given(place: Place, tensors: &Backward) -> Tensor {
    let forward = &tensors.forward;
    let nth = |list: &[Tensor], n: usize| list.get(n).copied().unwrap_or_default();
    match place {
        Place::Query => forward.query,
        Place::Key => forward.key,
        Place::Value => forward.value,
        Place::Sinks => forward.sinks,
        Place::Mask(n) => nth(forward.mask_tensors, n),
        Place::Bias(n) => nth(forward.bias_tensors, n),
        Place::Out => forward.out,
        Place::Lse => forward.lse,
        Place::DOut => tensors.d_out,
        Place::DLse => tensors.d_lse,
        Place::DQuery => tensors.d_query,
        Place::DKey => tensors.d_key,
        Place::DValue => tensors.d_value,
        Place::DSinks => tensors.d_sinks,
        Place::DBias(n) => nth(tensors.d_bias_tensors, n),
    }
}

/// That no list of tensors is longer than what is read of it.
fn check_lists(variant: &Variant, tensors: &Backward) -> Result<(), Error> {
    let count = |wanted: fn(Place) -> bool| {
        let places = variant.tensors.iter().map(|rule| rule.place);
        places.filter(|&place| wanted(place)).count()
    };
    let lists = [
        (
            "mask_tensors",
            tensors.forward.mask_tensors.len(),
            count(|place| matches!(place, Place::Mask(_))),
        ),
        (
            "bias_tensors",
            tensors.forward.bias_tensors.len(),
            count(|place| matches!(place, Place::Bias(_))),
        ),
        (
            "d_bias_tensors",
            tensors.d_bias_tensors.len(),
            count(|place| matches!(place, Place::DBias(_))),
        ),
    ];
    for (name, found, needed) in lists {
        if found > needed {
            return Err(Error::WrongSize(format!(
                "{name}: found {found} tensors, needed {needed}"
            )));
        }
    }
    Ok(())
}

/// The bytes that a launch of these sizes needs. Addresses are not read.
pub(crate) fn workspace(
    problem: &Problem,
    operation: Operation,
    tensors: &Backward,
    gpu: Gpu,
) -> Result<usize, Error> {
    let (variant, _) = choose(problem, operation, gpu)?;
    let mut values = Values::of_sizes(problem)?;
    for rule in variant.tensors {
        values.read_shape(rule, given(rule.place, tensors));
    }
    values.lay_out(variant)
}

/// The launches, in order, none of which does nothing.
pub(crate) fn launches(
    problem: &Problem,
    operation: Operation,
    tensors: &Backward,
    workspace: Workspace,
    gpu: Gpu,
) -> Result<Vec<Launch>, Error> {
    let (variant, from_ptx) = choose(problem, operation, gpu)?;
    check_lists(variant, tensors)?;
    let mut values = Values::of_sizes(problem)?;
    for rule in variant.tensors {
        values.read_tensor(rule, given(rule.place, tensors))?;
    }
    for condition in variant.conditions {
        values.check_condition(condition)?;
    }
    let needed = values.lay_out(variant)?;
    let Workspace { address, bytes } = workspace;
    if needed > bytes || (needed > 0 && address == 0) {
        return Err(Error::SmallWorkspace {
            bytes,
            address,
            needed,
        });
    }
    if needed > 0 && address % WORKSPACE_ALIGNMENT as u64 != 0 {
        return Err(Error::NotAligned(format!(
            "workspace: found {address:#x}, needed a multiple of {WORKSPACE_ALIGNMENT}"
        )));
    }
    for &(value, _) in variant.slices {
        let place = &mut values.whole[usize::from(value)];
        *place = place.wrapping_add(address as i64);
    }
    let mut made = Vec::with_capacity(variant.launches.len());
    for rule in variant.launches {
        made.extend(values.launch(rule, from_ptx)?);
    }
    if made.is_empty() {
        return Err(Error::Empty);
    }
    Ok(made)
}
