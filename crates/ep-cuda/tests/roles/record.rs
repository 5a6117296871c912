//! Named numbers and bytes, and the file in which the program finds them.

use std::collections::BTreeMap;

/// Numbers, inputs and expected outputs, by name.
#[derive(Debug, Clone, Default)]
pub(crate) struct Record {
    pub(crate) numbers: BTreeMap<&'static str, u64>,
    pub(crate) inputs: BTreeMap<&'static str, Vec<u8>>,
    pub(crate) outputs: BTreeMap<&'static str, Vec<u8>>,
}

impl Record {
    pub(crate) fn number(&mut self, name: &'static str, value: usize) {
        self.numbers.insert(name, value as u64);
    }
    pub(crate) fn input(&mut self, name: &'static str, bytes: Vec<u8>) {
        self.inputs.insert(name, bytes);
    }
    pub(crate) fn output(&mut self, name: &'static str, bytes: Vec<u8>) {
        self.outputs.insert(name, bytes);
    }
}

/// Words of 64 bits, and byte arrays with their length before them.
#[derive(Default)]
pub(crate) struct File(pub(crate) Vec<u8>);

impl File {
    pub(crate) fn word(&mut self, word: u64) {
        self.0.extend(word.to_le_bytes());
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        self.0.extend(bytes);
    }

    pub(crate) fn record(&mut self, record: &Record) {
        self.word(record.numbers.len() as u64);
        for (name, &value) in &record.numbers {
            self.bytes(name.as_bytes());
            self.word(value);
        }
        for named in [&record.inputs, &record.outputs] {
            self.word(named.len() as u64);
            for (name, bytes) in named {
                self.bytes(name.as_bytes());
                self.bytes(bytes);
            }
        }
    }
}

pub(crate) fn words(all: &[u32]) -> Vec<u8> {
    all.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn floats(all: &[f32]) -> Vec<u8> {
    all.iter().flat_map(|value| value.to_le_bytes()).collect()
}
