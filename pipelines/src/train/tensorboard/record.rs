//! The framing of a TFRecord file: length, CRC of the length, data, CRC of the data, all numbers little-endian.

/// Bytes of a length and its CRC.
const HEADER: usize = 12;
/// Bytes of a CRC.
const CRC: usize = 4;

/// A record with these data.
pub(super) fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length).to_le_bytes(), data, &masked_crc(data).to_le_bytes()].concat()
}

/// The records of a file and their data, up to its end or the first damaged one.
#[derive(Debug)]
pub(super) struct Records<'a>(pub(super) &'a [u8]);

impl<'a> Iterator for Records<'a> {
    /// A whole record, and its data.
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (length, crc) = self.0.get(..HEADER)?.split_at(HEADER - CRC);
        let size = usize::try_from(u64::from_le_bytes(length.try_into().ok()?)).ok()?;
        let end = size.checked_add(HEADER + CRC)?;
        let record = self.0.get(..end).filter(|_| crc == masked_crc(length).to_le_bytes())?;
        let (data, crc) = record[HEADER..].split_at(size);
        self.0 = &self.0[end..];
        (crc == masked_crc(data).to_le_bytes()).then_some((record, data))
    }
}

/// CRC-32C, rotated and shifted as TensorFlow does, because data may contain CRCs themselves.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli) of RFC 3720, a byte at a time.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| TABLE[usize::from(crc as u8 ^ byte)] ^ (crc >> 8))
}

/// The CRC of each byte.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u32, 0);
        while bit < 8 {
            // The polynomial 0x1edc6f41 with its bits reversed.
            crc = (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 3720, appendix B.4.
    #[test]
    fn crc_of_the_standard() {
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&ascending), 0x46dd_794e);
    }

    /// Cut or changed anywhere, a file has the records before that place.
    #[test]
    fn a_damaged_file_has_the_records_before() {
        let whole = [frame(b"first"), frame(b""), frame(b"third")].concat();
        let data = |bytes: &[u8]| Records(bytes).map(|(_, data)| data.to_vec()).collect::<Vec<_>>();
        assert_eq!(data(&whole), [&b"first"[..], b"", b"third"]);
        // Records of 21, 16 and 21 bytes.
        let before = |place: usize| [21, 37, 58].iter().filter(|&&end| end <= place).count();
        for place in 0..whole.len() {
            assert_eq!(data(&whole[..place]).len(), before(place), "cut at {place}");
            let mut changed = whole.clone();
            changed[place] ^= 0x10;
            assert_eq!(data(&changed).len(), before(place), "changed at {place}");
        }
    }
}
