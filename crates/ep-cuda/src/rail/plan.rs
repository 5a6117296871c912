//! A proxy's copy of a plan, which is valid.

use std::mem::offset_of;
use std::ops::Range;

use ep::Size;

use super::window::RailWindow;
use crate::params::{MAX_CHUNKS, MAX_GROUPS, RAIL_SECTIONS, RailPer, RailPlan, RailSection, UnitEnd};

/// A valid plan. It is a copy, so that a peer that changes its plan later does not change what the proxy does.
///
/// A plan without units is treated as a plan of one unit that has no rows and no flags. That unit has the elements of the
/// sections with a single element ([`RailPer::Once`]).
#[derive(Debug)]
pub(super) struct ValidPlan {
    sections: [Option<Section>; RAIL_SECTIONS],
    rows: u32,
    chunk_rows: u32,
    /// 0 for a plan without units.
    flags_per_unit: usize,
    /// By unit; at least one.
    ends: Vec<UnitEnd>,
}

/// A section that is used.
#[derive(Debug, Clone, Copy)]
struct Section {
    /// Offset in the lane, bytes.
    offset: usize,
    /// Bytes of an element.
    stride: usize,
    per: RailPer,
}

impl ValidPlan {
    /// Reads the plan at `offset` of a window, which must be that of `epoch`.
    ///
    /// # Errors
    /// What is wrong with the plan. No word of it is trusted.
    pub(super) fn read(window: &RailWindow, offset: usize, epoch: u32) -> Result<Self, String> {
        let word = |field: usize| window.u32_at(offset + field);
        let found = word(offset_of!(RailPlan, epoch));
        if found != epoch {
            return Err(format!("epoch {found} in place of epoch {epoch}"));
        }
        let units = word(offset_of!(RailPlan, units)) as usize;
        if units > MAX_CHUNKS {
            return Err(format!("{units} units; at most {MAX_CHUNKS} are possible"));
        }
        let flags_per_unit = word(offset_of!(RailPlan, flags_per_unit)) as usize;
        if units > 0 && !(1..=MAX_GROUPS).contains(&flags_per_unit) {
            return Err(format!("{flags_per_unit} flags per unit; from 1 to {MAX_GROUPS} are possible"));
        }
        let (rows, copies) = (word(offset_of!(RailPlan, rows)), word(offset_of!(RailPlan, copies)));
        let chunk_rows = word(offset_of!(RailPlan, chunk_rows));
        if u64::from(rows) > MAX_CHUNKS as u64 * u64::from(chunk_rows) || chunk_rows == 0 {
            return Err(format!(
                "{rows} rows in chunks of {chunk_rows}; from 1 to {MAX_CHUNKS} chunks are possible"
            ));
        }
        let end = |unit: usize| {
            let at = end_offset(unit);
            UnitEnd {
                rows: word(at + offset_of!(UnitEnd, rows)),
                copies: word(at + offset_of!(UnitEnd, copies)),
            }
        };
        let ends: Vec<UnitEnd> =
            if units == 0 { vec![UnitEnd::default()] } else { (0..units).map(end).collect() };
        check_ends("rows", rows, ends.iter().map(|end| end.rows))?;
        check_ends("copies", copies, ends.iter().map(|end| end.copies))?;

        let mut sections = [None; RAIL_SECTIONS];
        for (index, section) in sections.iter_mut().enumerate() {
            let at = offset_of!(RailPlan, sections) + index * size_of::<RailSection>();
            let field = |field: usize| word(at + field);
            let start = window.u64_at(offset + at + offset_of!(RailSection, offset));
            let (stride, per) = (field(offset_of!(RailSection, stride)), field(offset_of!(RailSection, per)));
            if stride == 0 {
                continue;
            }
            let per =
                RailPer::of(per).ok_or_else(|| format!("section {index} with the unknown code {per}"))?;
            let count = match per {
                RailPer::Row => rows,
                RailPer::Copy => copies,
                RailPer::Once => 1,
            };
            // A number that does not fit a `usize` is too large for any lane, and so is `usize::MAX`, which replaces it.
            let number = |value: u64| Size::new(usize::try_from(value).unwrap_or(usize::MAX));
            let lane_bytes = window.layout().lane_bytes();
            let fits = (number(start) + number(count.into()) * number(stride.into()))
                .checked()
                .is_some_and(|end| end <= lane_bytes);
            if !fits {
                return Err(format!(
                    "section {index} of {count} elements of {stride} bytes at offset {start}, outside a lane of \
                     {lane_bytes} bytes"
                ));
            }
            *section = Some(Section { offset: start as usize, stride: stride as usize, per });
        }
        let flags_per_unit = if units == 0 { 0 } else { flags_per_unit };
        Ok(Self { sections, rows, chunk_rows, flags_per_unit, ends })
    }

    /// Bytes of the plan without the places of units that it does not have.
    pub(super) fn bytes(&self) -> usize {
        end_offset(if self.flags_per_unit == 0 { 0 } else { self.units() })
    }

    /// Number of units, at least 1.
    pub(super) fn units(&self) -> usize {
        self.ends.len()
    }

    /// The flags of a unit, as indices of `RailEnd::out_flags`.
    pub(super) fn flags(&self, unit: usize) -> Range<usize> {
        unit * self.flags_per_unit..(unit + 1) * self.flags_per_unit
    }

    /// Whether the plan uses this section.
    pub(super) fn uses(&self, section: usize) -> bool {
        self.sections[section].is_some()
    }

    /// The bytes of the lane that belong to these units of a section; `None` if there are none. `units` is not empty.
    pub(super) fn part(&self, section: usize, units: &Range<usize>) -> Option<Range<usize>> {
        let Section { offset, stride, per } = self.sections[section]?;
        let before = units.start.checked_sub(1).map_or(UnitEnd::default(), |unit| self.ends[unit]);
        let last = self.ends[units.end - 1];
        let (begin, end) = match per {
            RailPer::Row => (before.rows, last.rows),
            RailPer::Copy => (before.copies, last.copies),
            RailPer::Once => (0, u32::from(units.start == 0)),
        };
        (begin < end).then(|| offset + begin as usize * stride..offset + end as usize * stride)
    }

    /// The sections with bytes in a unit, as bits.
    pub(super) fn sections_of(&self, unit: usize) -> u8 {
        let bit = |section| u8::from(self.part(section, &(unit..unit + 1)).is_some()) << section;
        (0..RAIL_SECTIONS).map(bit).sum()
    }

    /// The number of chunks that have arrived once the first `units` units have arrived with all sections.
    pub(super) fn chunks_of(&self, units: usize) -> usize {
        let chunks = self.rows.div_ceil(self.chunk_rows).max(1) as usize;
        if units == self.units() {
            return chunks;
        }
        // The last chunk has arrived only when the whole set has, including units without rows at its end.
        let rows = units.checked_sub(1).map_or(0, |last| self.ends[last].rows);
        (chunks - 1).min((rows / self.chunk_rows) as usize)
    }
}

/// The offset of a unit's end in a plan.
fn end_offset(unit: usize) -> usize {
    offset_of!(RailPlan, ends) + unit * size_of::<UnitEnd>()
}

/// Checks that the ends of units do not decrease, and that the last one is `total`.
fn check_ends(what: &str, total: u32, ends: impl Iterator<Item = u32>) -> Result<(), String> {
    let mut before = 0;
    for (unit, end) in ends.enumerate() {
        if end < before {
            return Err(format!(
                "unit {unit} ends after {end} {what}, but the unit before it after {before}"
            ));
        }
        before = end;
    }
    if before == total { Ok(()) } else { Err(format!("{total} {what}, but its units have {before}")) }
}
