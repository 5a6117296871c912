//! Options of an engine over a provider of the fake.

use ep_fabric::Options;
use ep_fabric_fake::Fake;

pub(crate) trait Opens {
    fn options(&self) -> Options;
}

impl Opens for Fake {
    fn options(&self) -> Options {
        crate::common::options(self.provider(), Some(self.path().into()))
    }
}
