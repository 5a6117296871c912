//! Rice codes of 16-bit numbers (R. F. Rice, 1979), which are short for geometrically distributed numbers.
//!
//! With parameter `b`, a number `n` is written as `n >> b` zero bits, a one bit, and the low `b` bits of `n`. Bits fill
//! bytes from the lowest; the last byte is padded with zeros. Gaps between entries kept with probability `d` are
//! geometrically distributed. For them the best `b` is within 0.03 bits per entry of the entropy limit `H(d) / d` at 1%
//! density.

/// The largest parameter. With 16, the code of every number has 17 bits.
pub(super) const MAX_PARAMETER: u32 = 16;

/// The bytes are not the codes of the given number of numbers.
#[derive(Debug, PartialEq)]
pub(super) struct BadCode;

/// The parameter that gives these numbers the fewest bits (of equal ones the lowest), and that number of bits.
fn best_parameter(numbers: &[u16]) -> (u32, u64) {
    let bits = |b: u32| {
        let quotients: u64 = numbers.iter().map(|&n| u64::from(u32::from(n) >> b)).sum();
        numbers.len() as u64 * u64::from(b + 1) + quotients
    };
    // All parameters are tried: the mean gives the best one only for geometric numbers, and indices of real experts
    // cluster.
    (0..=MAX_PARAMETER).map(|b| (b, bits(b))).min_by_key(|&(_, bits)| bits).unwrap_or_default()
}

/// Encodes `numbers` with the best parameter, and returns that parameter too.
pub(super) fn encode_best(numbers: &[u16]) -> (Vec<u8>, u32) {
    let (parameter, bits) = best_parameter(numbers);
    let mut bytes = Vec::with_capacity(bits.div_ceil(8) as usize + 4);
    encode(numbers, parameter, &mut bytes);
    (bytes, parameter)
}

/// Appends the codes of `numbers`.
fn encode(numbers: &[u16], parameter: u32, out: &mut Vec<u8>) {
    // At most this many zeros are written at a time, so that a code (15 + 1 + 16 bits) and 31 waiting bits fit into 64.
    const RUN: u32 = 15;
    let (mut waiting, mut bits) = (0_u64, 0);
    let mut flush = |waiting: &mut u64, bits: &mut u32| {
        if *bits >= 32 {
            out.extend_from_slice(&(*waiting as u32).to_le_bytes());
            *waiting >>= 32;
            *bits -= 32;
        }
    };
    for &number in numbers {
        let number = u32::from(number);
        let mut zeros = number >> parameter;
        while zeros > RUN {
            bits += RUN;
            zeros -= RUN;
            flush(&mut waiting, &mut bits);
        }
        let rest = u64::from(number) & ((1 << parameter) - 1);
        waiting |= (1 | rest << 1) << zeros << bits;
        bits += zeros + 1 + parameter;
        flush(&mut waiting, &mut bits);
    }
    let tail = bits.div_ceil(8) as usize;
    out.extend_from_slice(&waiting.to_le_bytes()[..tail]);
}

/// Decodes exactly `numbers.len()` numbers, whose codes must be exactly `bytes`.
pub(super) fn decode(bytes: &[u8], parameter: u32, numbers: &mut [u16]) -> Result<(), BadCode> {
    if parameter > MAX_PARAMETER {
        return Err(BadCode);
    }
    let mask = (1 << parameter) - 1;
    let limit = u32::from(u16::MAX) >> parameter;
    let (mut bit, mut all) = (0, 0);
    // Each number starts where the previous one ends. Decoding four numbers per window keeps memory loads out of this
    // chain of dependencies.
    for group in numbers.chunks_mut(4) {
        let mut window = window(bytes, bit);
        let mut left = WINDOW_BITS;
        for number in group {
            let mut quotient = window.trailing_zeros();
            if quotient + 1 + parameter > left {
                (quotient, bit) = long_quotient(bytes, bit, limit)?;
                window = self::window(bytes, bit);
                left = WINDOW_BITS;
            } else {
                bit += quotient as usize + 1;
                window >>= quotient + 1;
                left -= quotient + 1;
            }
            let wide = quotient << parameter | (window as u32 & mask);
            all |= wide;
            *number = wide as u16;
            bit += parameter as usize;
            window >>= parameter;
            left -= parameter;
        }
    }
    let is_end = bytes.len() == bit.div_ceil(8) && window(bytes, bit) == 0;
    if is_end && all <= u32::from(u16::MAX) { Ok(()) } else { Err(BadCode) }
}

/// Minimum number of valid bits of a window.
const WINDOW_BITS: u32 = 57;

/// Returns at least the next [`WINDOW_BITS`] bits; bits after the end are zeros.
#[inline(always)]
fn window(bytes: &[u8], bit: usize) -> u64 {
    let rest = bytes.get(bit / 8..).unwrap_or_default();
    let word = match rest.first_chunk::<8>() {
        Some(word) => u64::from_le_bytes(*word),
        None => rest.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)),
    };
    word >> (bit % 8)
}

/// Reads a run of zeros that may be longer than a window. Returns its length and the position after its final one bit.
#[cold]
fn long_quotient(bytes: &[u8], mut bit: usize, limit: u32) -> Result<(u32, usize), BadCode> {
    let mut quotient = 0;
    loop {
        let zeros = window(bytes, bit).trailing_zeros();
        if zeros < WINDOW_BITS {
            return Ok((quotient + zeros, bit + zeros as usize + 1));
        }
        // This bound also ends a run that extends beyond the end of the bytes.
        quotient += WINDOW_BITS;
        bit += WINDOW_BITS as usize;
        if quotient > limit {
            return Err(BadCode);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round_trip(numbers: &[u16], parameter: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode(numbers, parameter, &mut bytes);
        let mut back = vec![0; numbers.len()];
        assert_eq!(decode(&bytes, parameter, &mut back), Ok(()));
        assert_eq!(back, numbers);
        bytes
    }

    #[test]
    fn codes_are_those_computed_by_hand() {
        assert!(round_trip(&[], 3).is_empty());
        assert_eq!(round_trip(&[0, 0, 0], 0), [0b111]);
        assert_eq!(round_trip(&[2, 0, 1], 0), [0b0010_1100]); // from the lowest: 001, 1, 01
        assert_eq!(round_trip(&[13], 2), [0b01_1000]); // 3 zeros, a one, then 1 in two bits
        assert_eq!(round_trip(&[65_535], 16), [0xFF, 0xFF, 1]);
        assert_eq!(round_trip(&[65_535], 0).len(), 8192);
    }

    #[test]
    fn numbers_of_more_than_16_bits_are_refused() {
        let one = |bytes: &[u8], parameter| {
            let mut number = [0];
            decode(bytes, parameter, &mut number).map(|()| number[0])
        };
        // 15 and 20 zeros, a one, then 12 bits of zeros: 15 << 12 fits, 20 << 12 does not.
        assert_eq!(one(&[0, 0x80, 0, 0], 12), Ok(15 << 12));
        assert_eq!(one(&[0, 0, 0x10, 0, 0], 12), Err(BadCode));
        // Refused also if a number that fits follows.
        assert_eq!(decode(&[0, 0, 0x10, 0, 0x2, 0], 12, &mut [0; 2]), Err(BadCode));
        // 2^17 zeros: the quotient times 2^15 would be 0 in 32 bits.
        assert_eq!(one(&[vec![0; 1 << 14], vec![1, 0]].concat(), 15), Err(BadCode));
    }

    #[test]
    fn invalid_bytes_are_refused() {
        let numbers = [5, 700, 3, 65_535, 0];
        let bytes = round_trip(&numbers, 4);
        let decode = |bytes: &[u8], parameter, count| decode(bytes, parameter, &mut vec![0; count]);
        assert_eq!(decode(&bytes[..bytes.len() - 1], 4, 5), Err(BadCode));
        assert_eq!(decode(&[bytes.as_slice(), &[0]].concat(), 4, 5), Err(BadCode));
        assert_eq!(decode(&bytes, 4, 4), Err(BadCode));
        assert_eq!(decode(&bytes, 4, 6), Err(BadCode));
        assert_eq!(decode(&bytes, 17, 5), Err(BadCode));
        assert_eq!(decode(&[0; 9000], 0, 1), Err(BadCode)); // a quotient beyond any number
        assert_eq!(decode(&[0b1000_0001], 0, 1), Err(BadCode)); // padded with a one
    }

    proptest! {
        #[test]
        fn any_numbers_survive_encoding_and_decoding(
            numbers in prop::collection::vec((0_u16.., 0_u32..16).prop_map(|(n, shift)| n >> shift), 0..300),
        ) {
            let (best, bits) = best_parameter(&numbers);
            for parameter in [0, best, MAX_PARAMETER] {
                let bytes = round_trip(&numbers, parameter);
                prop_assert!(parameter != best || bytes.len() as u64 == bits.div_ceil(8));
            }
        }

        #[test]
        fn any_bytes_are_refused_or_decoded(
            bytes in prop::collection::vec(any::<u8>(), 0..100), parameter in 0_u32..=20, count in 0_usize..200,
        ) {
            let mut numbers = vec![0; count];
            if decode(&bytes, parameter, &mut numbers).is_ok() {
                let mut again = Vec::new();
                encode(&numbers, parameter, &mut again);
                prop_assert_eq!(again, bytes);
            }
        }
    }
}
