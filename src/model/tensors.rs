//! Host memory to tensors and back, and operations on tensors that several parts of the model share.

use std::{marker::PhantomData, mem::ManuallyDrop, ops::Deref};

use tch::{Device, Kind, Tensor};

use super::{DeviceError, cell::cuda};

/// Kind and device of tensors for our own passes.
pub(crate) const FLOAT_ON_HOST: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Replaces a tensor of a model.
pub(crate) type Change<'c, E> = dyn FnMut(&Tensor) -> Result<Tensor, E> + 'c;

/// Copies row-major float32 values to a tensor of `shape` on `device`.
pub(crate) fn upload(data: &[f32], shape: &[i64], kind: Kind, device: Device) -> Result<Tensor, DeviceError> {
    let values = shape.iter().try_fold(1_usize, |n, &dim| n.checked_mul(usize::try_from(dim).ok()?));
    if values != Some(data.len()) {
        // libtorch would read as many values as the shape says.
        return Err(DeviceError::internal(format!("{} values for a tensor of shape {shape:?}", data.len())));
    }
    // SAFETY of the cast: any initialised f32 is four initialised bytes.
    let bytes = unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), std::mem::size_of_val(data)) };
    let host = Tensor::f_from_data_size(bytes, shape, Kind::Float)?;
    Ok(uploaded(&host, device)?.f_to_kind(kind)?)
}

/// Larger transfers are made from and to ordinary memory: libtorch keeps pinned memory for the next ones, and does not give it back.
const MOST_PINNED_BYTES: usize = 128 << 20;

/// A contiguous tensor in host memory, which may be pinned: memory that a GPU reads and writes by itself, at the full speed of the bus,
/// while threads go on.
#[derive(Debug)]
pub(crate) struct HostTensor {
    tensor: ManuallyDrop<Tensor>,
    pinned_for: Option<&'static cuda::Context>,
}

impl Deref for HostTensor {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

impl Drop for HostTensor {
    fn drop(&mut self) {
        // libtorch asks the GPU when it may use pinned memory again, and ends the process if the GPU has failed. What a failed GPU may
        // still write to stays allocated.
        if self.pinned_for.is_none_or(cuda::Context::is_alive) {
            // SAFETY: dropped once, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.tensor) }
        }
    }
}

impl HostTensor {
    fn new(tensor: Tensor, pinned_for: Option<&'static cuda::Context>) -> Self {
        Self { tensor: ManuallyDrop::new(tensor), pinned_for }
    }
}

/// The GPU of a device, if numbers of this size are transferred through pinned memory.
fn pins(device: Device, tensor: &Tensor) -> Result<Option<&'static cuda::Context>, DeviceError> {
    let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
    match device {
        Device::Cuda(number) if bytes <= MOST_PINNED_BYTES => Ok(cuda::context(number)?.ok()),
        _ => Ok(None),
    }
}

/// A contiguous float32 tensor on the host: the tensor itself if it is one.
pub(crate) fn on_host(tensor: &Tensor) -> Result<HostTensor, DeviceError> {
    on_host_as(tensor, Kind::Float)
}

/// A contiguous tensor of this kind on the host: the tensor itself if it is one. Waits only for work that a GPU was given before.
fn on_host_as(tensor: &Tensor, kind: Kind) -> Result<HostTensor, DeviceError> {
    let tensor = tensor.f_to_kind(kind)?.f_contiguous()?;
    if let Some(gpu) = pins(tensor.device(), &tensor)?
        && let Ok(host) = tensor.f_to_device_(Device::Cpu, kind, true, false)
    {
        let host = HostTensor::new(host, Some(gpu));
        gpu.wait()?;
        return Ok(host);
    }
    Ok(HostTensor::new(tensor.f_to_device(Device::Cpu)?, None))
}

/// Row-major numbers in host memory, not copied again.
#[derive(Debug)]
pub(crate) struct OnHost<T> {
    tensor: HostTensor,
    numbers: PhantomData<T>,
}

impl<T: Number> OnHost<T> {
    /// Downloads a tensor, which nobody else may have: where it is in host memory already, its numbers are read there.
    pub(crate) fn new(tensor: Tensor) -> Result<Self, DeviceError> {
        Ok(Self { tensor: on_host_as(&tensor, T::KIND)?, numbers: PhantomData })
    }
}

impl<T: Number> Deref for OnHost<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: nothing writes to the tensor.
        unsafe { values(&self.tensor) }
    }
}

/// A copy on a device. From pinned memory a GPU copies when it comes to it; otherwise it would have to finish all other work first.
pub(crate) fn uploaded(host: &Tensor, device: Device) -> Result<Tensor, DeviceError> {
    if let Some(gpu) = pins(device, host)?
        && let Ok(pinned) = host.f_internal_pin_memory(device)
    {
        let pinned = HostTensor::new(pinned, Some(gpu));
        return Ok(pinned.f_to_device_(device, host.kind(), true, false)?);
    }
    Ok(host.f_to_device(device)?)
}

/// A copy in memory of its own, contiguous. Gradients flow through it.
pub(crate) fn copied(tensor: &Tensor) -> Result<Tensor, DeviceError> {
    Ok(tensor.f_to_device_(tensor.device(), tensor.kind(), false, true)?.f_contiguous()?)
}

/// Copies a tensor to the host as row-major float32 values.
pub(crate) fn download(tensor: &Tensor) -> Result<Vec<f32>, DeviceError> {
    let host = on_host(tensor)?;
    let mut values = vec![0.0; host.numel()];
    host.f_copy_data(&mut values, host.numel())?;
    Ok(values)
}

/// Minimum number of columns of a product.
///
/// libtorch multiplies by narrow matrices with other kernels, where a row's bits depend on its neighbours: measured for
/// 1, 5, 6, 7, 9, 10 and 11 columns (MKL, Zen 3), at any height.
pub(crate) const MIN_COLUMNS: i64 = 16;

/// Pads a weight for the right side of a product with columns of zeros to [`MIN_COLUMNS`].
pub(crate) fn with_enough_columns(weight: Tensor) -> Result<Tensor, DeviceError> {
    let mut shape = weight.size();
    let Some(columns) = shape.last_mut() else { return Ok(weight) };
    if *columns >= MIN_COLUMNS {
        return Ok(weight);
    }
    *columns = MIN_COLUMNS - *columns;
    let zeros = Tensor::f_zeros(&shape, (weight.kind(), weight.device()))?;
    Ok(Tensor::f_cat(&[weight, zeros], -1)?)
}

/// The first `columns` columns of a product, contiguous.
pub(crate) fn first_columns(product: Tensor, columns: i64) -> Result<Tensor, DeviceError> {
    if product.size().last() == Some(&columns) {
        return Ok(product);
    }
    Ok(product.f_narrow(-1, 0, columns)?.f_contiguous()?)
}

/// Indices of rows, on `device`.
pub(crate) fn index(ids: &[i64], device: Device) -> Result<Tensor, DeviceError> {
    uploaded(&Tensor::f_from_slice(ids)?, device)
}

/// Rows of each direction: `[2, R, X] -> [2, n, X]`. `rows` has `n` indices per direction.
pub(crate) fn rows_of_each(t: &Tensor, rows: [&[i64]; 2]) -> Result<Tensor, DeviceError> {
    if rows[0] == rows[1] {
        return Ok(t.f_index_select(1, &index(rows[0], t.device())?)?);
    }
    let [forward, backward] = unbound(t)?;
    let forward = forward.f_index_select(0, &index(rows[0], t.device())?)?;
    let backward = backward.f_index_select(0, &index(rows[1], t.device())?)?;
    Ok(Tensor::f_stack(&[forward, backward], 0)?)
}

/// Views of the parts of a tensor along `dim`. The backward pass is one concatenation, where that of `narrow` would
/// fill a tensor of the size of `t` for each part.
pub(crate) fn split<const N: usize>(t: &Tensor, sizes: [i64; N], dim: i64) -> Result<[Tensor; N], DeviceError> {
    exactly(t.f_split_with_sizes(sizes, dim)?)
}

/// Views of both directions: `[2, ..] -> 2 x [..]`.
pub(crate) fn unbound(t: &Tensor) -> Result<[Tensor; 2], DeviceError> {
    exactly(t.f_unbind(0)?)
}

pub(crate) fn exactly<const N: usize>(parts: Vec<Tensor>) -> Result<[Tensor; N], DeviceError> {
    parts.try_into().map_err(|parts: Vec<Tensor>| DeviceError::internal(format!("{} parts, not {N}", parts.len())))
}

/// The sum of tensors of the same shape.
///
/// # Errors
/// [`DeviceError::InvalidBatch`] when there is none; as the terms, and when libtorch fails.
pub(crate) fn sum(terms: impl Iterator<Item = Result<Tensor, DeviceError>>) -> Result<Tensor, DeviceError> {
    let mut sum: Option<Tensor> = None;
    for term in terms {
        sum = Some(match sum {
            None => term?,
            Some(sum) => sum.f_add(&term?)?,
        });
    }
    sum.ok_or(DeviceError::InvalidBatch { reason: "a combination of no layers" })
}

/// A type of numbers in tensors.
pub(crate) trait Number {
    const KIND: Kind;
}

impl Number for f32 {
    const KIND: Kind = Kind::Float;
}

impl Number for f64 {
    const KIND: Kind = Kind::Double;
}

impl Number for i32 {
    const KIND: Kind = Kind::Int;
}

impl Number for i8 {
    const KIND: Kind = Kind::Int8;
}

/// The values of a contiguous tensor of these numbers on the host.
///
/// # Safety
/// While the slice lives, nothing may write to these values: neither through another tensor that shares the storage nor
/// through a slice of [`values_mut`].
pub(crate) unsafe fn values<T: Number>(tensor: &Tensor) -> &[T] {
    assert_host::<T>(tensor);
    if tensor.numel() == 0 {
        return &[]; // its pointer is null
    }
    // SAFETY: contiguous numbers of this type on the host (asserted), which the borrow keeps alive and nothing writes to (the
    // caller's promise).
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<T>(), tensor.numel()) }
}

/// The values of a contiguous tensor of these numbers on the host, to be changed in place.
///
/// # Safety
/// While the slice lives, nothing else may read or write these values: neither through another tensor that shares the
/// storage nor through another slice. The exclusive borrow does not prevent that, because tensors share storage.
pub(crate) unsafe fn values_mut<T: Number>(tensor: &mut Tensor) -> &mut [T] {
    assert_host::<T>(tensor);
    if tensor.numel() == 0 {
        return &mut []; // its pointer is null
    }
    // SAFETY: contiguous numbers of this type on the host (asserted), which the borrow keeps alive and nothing else accesses
    // (the caller's promise).
    unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<T>(), tensor.numel()) }
}

fn assert_host<T: Number>(tensor: &Tensor) {
    assert!(
        tensor.device() == Device::Cpu && tensor.kind() == T::KIND && tensor.is_contiguous(),
        "our own kernels take contiguous tensors of {:?} on the host",
        T::KIND
    );
}

/// Numbers for tests.
#[cfg(test)]
pub(crate) mod samples {
    use tch::Tensor;

    /// Between -1 and 1, of no pattern.
    pub(crate) fn numbers(count: usize, step: f32) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * step).sin()).collect()
    }

    /// `[k, n]`
    pub(crate) fn matrix(values: &[f32], k: usize) -> Tensor {
        Tensor::from_slice(values).view([k as i64, -1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_that_does_not_match_the_values_is_an_error() {
        for (values, shape) in [(0, vec![261, 16]), (3, vec![2, 2]), (5, vec![2, 2]), (4, vec![-2, -2])] {
            let error = upload(&vec![0.0; values], &shape, Kind::Float, Device::Cpu).unwrap_err();
            assert!(error.to_string().contains(&format!("{values} values")), "{error}");
        }
        let huge = upload(&[], &[1 << 40, 1 << 40], Kind::Float, Device::Cpu);
        assert!(huge.is_err());
        assert_eq!(download(&upload(&[1.0, 2.0], &[2, 1], Kind::Double, Device::Cpu).unwrap()).unwrap(), [1.0, 2.0]);
    }
}
