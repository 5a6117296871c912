//! Random content, the same in every run.

/// splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// A value of either sign with a magnitude from `2^-orders` to `2^orders`.
    pub(crate) fn float(&mut self, orders: u64) -> f32 {
        let bits = self.next();
        let exponent = 127 - orders + bits % (2 * orders);
        f32::from_bits((bits >> 32) as u32 & 0x807F_FFFF | (exponent as u32) << 23)
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }

    pub(crate) fn bf16s(&mut self, len: usize) -> Vec<u8> {
        (0..len).flat_map(|_| ((self.float(6).to_bits() >> 16) as u16).to_le_bytes()).collect()
    }

    pub(crate) fn weights(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.float(3).abs()).collect()
    }
}
