//! Host memory to tensors and back.

use tch::{Device, Kind, Tensor};

use super::DeviceError;
use crate::weights::{self, Weights};

/// A tensor that the shape plan promised.
pub(crate) fn require<'w>(weights: &'w Weights, name: &str) -> Result<&'w weights::Tensor, DeviceError> {
    weights.get(name).ok_or_else(|| DeviceError::Torch { message: format!("the weights lack {name}") })
}

/// Copies row-major float32 values to a tensor of `shape` on `device`.
pub(crate) fn upload(data: &[f32], shape: &[i64], kind: Kind, device: Device) -> Result<Tensor, DeviceError> {
    // SAFETY of the cast: any initialised f32 is four initialised bytes.
    let bytes = unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), std::mem::size_of_val(data)) };
    let host = Tensor::f_from_data_size(bytes, shape, Kind::Float)?;
    Ok(host.f_to_device(device)?.f_to_kind(kind)?)
}

/// A weight tensor in its own shape.
pub(crate) fn weight(tensor: &weights::Tensor, kind: Kind, device: Device) -> Result<Tensor, DeviceError> {
    let shape: Vec<i64> = tensor.shape.iter().map(|&n| n as i64).collect();
    upload(&tensor.data, &shape, kind, device)
}

/// Fewest columns of a product.
///
/// libtorch multiplies by narrow matrices with other kernels, where a row's bits depend on its neighbours: measured for
/// 1, 5, 6, 7, 9, 10 and 11 columns (MKL, Zen 3), at any height.
pub(crate) const MIN_COLUMNS: i64 = 16;

/// A weight for the right side of a product, columns of zeros added where it is too narrow.
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
    Ok(Tensor::f_from_slice(ids)?.f_to_device(device)?)
}

/// The values of a contiguous float32 tensor on CPU.
pub(crate) fn values(tensor: &Tensor) -> &[f32] {
    assert_host(tensor);
    // SAFETY: float32, contiguous and on the host (asserted); the borrow keeps the tensor alive.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<f32>(), tensor.numel()) }
}

/// The values of a contiguous float32 tensor on CPU, to be changed in place.
///
/// Tensors share storage, so the caller must be the only one who looks at these rows meanwhile.
pub(crate) fn values_mut(tensor: &mut Tensor) -> &mut [f32] {
    assert_host(tensor);
    // SAFETY: as above; callers own the storage (scratch buffers and fresh results of this module's siblings).
    unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<f32>(), tensor.numel()) }
}

fn assert_host(tensor: &Tensor) {
    assert!(
        tensor.device() == Device::Cpu && tensor.kind() == Kind::Float && tensor.is_contiguous(),
        "our own kernels take contiguous float32 tensors on the host"
    );
}

/// Brings a tensor to the host as float32.
pub(crate) fn download(tensor: &Tensor) -> Result<Tensor, DeviceError> {
    Ok(tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?.f_contiguous()?)
}
