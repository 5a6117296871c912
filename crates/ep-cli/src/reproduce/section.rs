//! The parts of a comparison: tables of values, and conclusions about claims of the paper.

/// The conclusion about a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Conclusion {
    Reproduces,
    Differs,
    /// The paper's values or inputs are not recorded in this program.
    CannotBeChecked,
}

impl Conclusion {
    pub(super) fn of(agrees: bool) -> Self {
        if agrees { Self::Reproduces } else { Self::Differs }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Reproduces => "reproduces",
            Self::Differs => "does not reproduce",
            Self::CannotBeChecked => "cannot be checked",
        }
    }
}

/// One claim of the paper, and the conclusion about it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Finding {
    pub(super) claim: String,
    pub(super) found: Conclusion,
    /// The correct conclusion; a different one is a fault of this program.
    pub(super) expected: Conclusion,
    pub(super) why: String,
}

/// A table of values.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Grid {
    pub(super) caption: String,
    pub(super) header: Vec<&'static str>,
    pub(super) rows: Vec<Vec<String>>,
}

/// A part of the paper.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Section {
    pub(super) title: &'static str,
    pub(super) about: String,
    pub(super) grids: Vec<Grid>,
    pub(super) findings: Vec<Finding>,
    /// File name and picture.
    pub(super) charts: Vec<(&'static str, String)>,
}

/// Whether all conclusions are as expected.
pub(super) fn as_expected(sections: &[Section]) -> bool {
    sections.iter().flat_map(|section| &section.findings).all(|finding| finding.found == finding.expected)
}

/// The cell that says whether a comparison agrees.
pub(super) fn agreement(agrees: bool) -> String {
    if agrees { "yes" } else { "NO" }.into()
}
