//! Which precision has the fastest matrix products on this machine. Nothing changes by itself: a user chooses.

use elmo::{
    ModelOptions,
    model::{DeviceName, Precision, matmul_ceiling},
};
use serde::Serialize;

use crate::error::Result;

/// Precisions of inference.
const PRECISIONS: [Precision; 5] = [Precision::F32, Precision::Tf32, Precision::Bf16, Precision::F16, Precision::Int8];

/// The speed of matrix products in a precision.
#[derive(Debug, Clone, Serialize)]
pub struct Speed {
    /// The precision.
    pub precision: String,
    /// 1e9 operations per second, of all lanes.
    pub gflops: f64,
    /// Relative to float32.
    pub relative: f64,
}

/// Measures each precision that these lanes have for about `seconds`, with the shapes of a model.
///
/// # Errors
/// [`elmo::Error`] when a device fails in float32. Another precision that fails is left out.
pub fn measure(options: &ModelOptions, lanes: &[DeviceName], seconds: f64) -> Result<Vec<Speed>> {
    let (mut speeds, mut reference) = (Vec::new(), None);
    for precision in PRECISIONS {
        let exists = match precision {
            Precision::Int8 => lanes.iter().all(|lane| *lane == DeviceName::Cpu),
            Precision::Tf32 | Precision::F16 => !lanes.contains(&DeviceName::Cpu),
            _ => true,
        };
        if !exists {
            continue;
        }
        let gflops = match matmul_ceiling(options, lanes, precision, seconds) {
            Ok(gflops) => gflops,
            // Not all devices have all formats.
            Err(reason) if reference.is_some() => {
                tracing::info!(%precision, %reason, "a precision was not measured");
                continue;
            }
            Err(error) => return Err(elmo::Error::from(error).into()),
        };
        let relative = gflops / *reference.get_or_insert(gflops);
        speeds.push(Speed { precision: precision.to_string(), gflops, relative });
    }
    Ok(speeds)
}

/// The measurements in a line, the fastest first.
pub fn text(speeds: &[Speed]) -> String {
    let mut speeds: Vec<&Speed> = speeds.iter().collect();
    speeds.sort_by(|a, b| b.gflops.total_cmp(&a.gflops));
    let shown = |speed: &&Speed| format!("{} {:.1}", speed.precision, speed.relative);
    let fastest = speeds.first().map_or("f32", |speed| speed.precision.as_str());
    format!("{fastest} (products relative to f32: {})", speeds.iter().map(shown).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_comes_first() {
        let speed =
            |precision: &str, gflops: f64| Speed { precision: precision.to_owned(), gflops, relative: gflops / 80.0 };
        let speeds = [speed("f32", 80.0), speed("bf16", 60.0), speed("int8", 360.0)];
        assert_eq!(text(&speeds), "int8 (products relative to f32: int8 4.5, f32 1.0, bf16 0.8)");
    }
}
