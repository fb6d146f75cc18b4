//! The protobuf message `Event` of TensorFlow (`tensorflow/core/util/event.proto`), as far as training writes it.
//!
//! ```text
//! Event       { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; SessionLog session_log = 7 }
//! Summary     { repeated Value value = 1 }    Value { string tag = 1; float simple_value = 2 }
//! SessionLog  { Status status = 1 }           Status { START = 1 }
//! ```

/// Wire types: what follows the number of a field.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;
const FIXED32: u8 = 5;

/// The first event of a file.
pub(super) fn version(wall_time: f64) -> Vec<u8> {
    [fixed64(1, wall_time), bytes(3, b"brain.Event:2")].concat()
}

/// Says that a process goes on with `step`: readers forget what they know of this step and later ones.
pub(super) fn start(wall_time: f64, step: u64) -> Vec<u8> {
    [fixed64(1, wall_time), varint(2, step), bytes(7, &varint(1, 1))].concat()
}

/// The scalars of a step.
pub(super) fn scalars(wall_time: f64, step: u64, values: &[(&str, f64)]) -> Vec<u8> {
    let value = |&(tag, value): &(&str, f64)| bytes(1, &[bytes(1, tag.as_bytes()), fixed32(2, value as f32)].concat());
    let summary: Vec<u8> = values.iter().flat_map(value).collect();
    [fixed64(1, wall_time), varint(2, step), bytes(5, &summary)].concat()
}

/// What has to be known of an event that was written earlier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Known {
    /// 0 if the event has none.
    pub(super) step: u64,
    pub(super) has_scalars: bool,
}

/// Reads an event; `None` if it is not one.
pub(super) fn read(mut event: &[u8]) -> Option<Known> {
    let mut known = Known::default();
    while !event.is_empty() {
        let key = take_varint(&mut event)?;
        let size = match (key & 7) as u8 {
            VARINT => {
                let value = take_varint(&mut event)?;
                if key >> 3 == 2 {
                    known.step = value;
                }
                0
            }
            FIXED64 => 8,
            BYTES => usize::try_from(take_varint(&mut event)?).ok()?,
            FIXED32 => 4,
            _ => return None,
        };
        known.has_scalars |= key >> 3 == 5;
        event = event.get(size..)?;
    }
    Some(known)
}

fn key(field: u8, wire_type: u8) -> u8 {
    field << 3 | wire_type
}

fn fixed64(field: u8, value: f64) -> Vec<u8> {
    [&[key(field, FIXED64)], &value.to_le_bytes()[..]].concat()
}

fn fixed32(field: u8, value: f32) -> Vec<u8> {
    [&[key(field, FIXED32)], &value.to_le_bytes()[..]].concat()
}

fn bytes(field: u8, value: &[u8]) -> Vec<u8> {
    let mut out = vec![key(field, BYTES)];
    put_varint(&mut out, value.len() as u64);
    out.extend_from_slice(value);
    out
}

fn varint(field: u8, value: u64) -> Vec<u8> {
    let mut out = vec![key(field, VARINT)];
    put_varint(&mut out, value);
    out
}

/// Seven bits a byte, the lowest first; the highest bit says that more follow.
fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn take_varint(from: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = from.split_first()?;
        *from = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_event_is_not_read() {
        assert_eq!(read(&scalars(1.0, 300, &[("a", 1.0)])), Some(Known { step: 300, has_scalars: true }));
        assert_eq!(read(&start(1.0, u64::MAX)), Some(Known { step: u64::MAX, has_scalars: false }));
        assert_eq!(read(&version(0.0)), Some(Known::default()));
        // A varint without an end, bytes beyond the end, and a wire type that does not exist.
        for bytes in [&[0x10, 0x80][..], &[0x10; 1], &[0x2a, 9, 1], &[0x09, 0], &[0x13, 0], &[0xff; 12]] {
            assert_eq!(read(bytes), None, "{bytes:?}");
        }
    }
}
