//! The contents of tokens. Each token is a function of the seed, its rank and its index, so that a receiving rank can
//! compute what it must have received.

use ep::Rank;

/// Writes one token of bf16 values: magnitudes from 2^-7 to 2, either sign, all bits of the mantissa in use.
pub(super) fn fill(seed: u64, rank: Rank, token: usize, row: &mut [u8]) {
    let mut state = mix(mix(seed).wrapping_add(u64::from(rank.0))).wrapping_add(token as u64);
    state = mix(state);
    for values in row.chunks_mut(8) {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        // Of every 16 bits, the sign, the low bits of the exponent and the mantissa are random; the high bits of the
        // exponent are those of 2^-7.
        let bits = (mix(state) & 0x83FF_83FF_83FF_83FF) | 0x3C00_3C00_3C00_3C00;
        values.copy_from_slice(&bits.to_le_bytes()[..values.len()]);
    }
}

/// The finaliser of splitmix64: every bit of the result depends on every bit of the argument.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_differ_and_their_magnitudes_are_bounded() {
        let token = |seed, rank, index| {
            let mut row = [0; 64];
            fill(seed, Rank(rank), index, &mut row);
            row
        };
        assert_eq!(token(1, 2, 3), token(1, 2, 3));
        for other in [token(2, 2, 3), token(1, 3, 3), token(1, 2, 4), token(0, 3, 2)] {
            assert_ne!(token(1, 2, 3), other);
        }
        for value in token(7, 0, 0).chunks_exact(2) {
            let value = ep::numeric::bf16_to_f32(u16::from_le_bytes([value[0], value[1]]));
            assert!((1.0 / 128.0..2.0).contains(&value.abs()), "{value}");
        }
    }
}
