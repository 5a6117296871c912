//! Parses `--stragglers`.

use ep_plan::ClusterDescription;
use ep_plan::limits::{self, Number};
use ep_plan::simulate::{Straggler, Stragglers};

const FORM: &str = "write gpu:3=1.5 or link:wan:0=2, several separated by commas, or random:0.05=1.3";

/// Parses the list. The simulator refuses GPUs and links that do not exist.
pub(super) fn parse(text: &str, cluster: &ClusterDescription) -> Result<Stragglers, String> {
    if let Some(random) = text.strip_prefix("random:") {
        let (fraction, slowdown) = random.split_once('=').ok_or(FORM)?;
        let (fraction, slowdown) = (number(fraction, limits::PART)?, number(slowdown, limits::SLOWDOWN)?);
        return Ok(Stragglers::Random { fraction, slowdown });
    }
    text.split(',')
        .map(|one| straggler(one.trim(), cluster))
        .collect::<Result<_, _>>()
        .map(Stragglers::Listed)
}

fn straggler(text: &str, cluster: &ClusterDescription) -> Result<Straggler, String> {
    let (what, slowdown) = text.split_once('=').ok_or(FORM)?;
    let slowdown = number(slowdown, limits::SLOWDOWN)?;
    match what.split(':').collect::<Vec<_>>()[..] {
        ["gpu", gpu] => Ok(Straggler::Gpu { gpu: index(gpu)?, slowdown }),
        ["link", level, link] => {
            let found = cluster.levels.iter().position(|known| known.name == level).ok_or_else(|| {
                let all: Vec<_> = cluster.levels.iter().map(|known| &*known.name).collect();
                format!("no level `{level}`; possible: {}", all.join(", "))
            })?;
            Ok(Straggler::Link { level: found, link: index(link)?, slowdown })
        }
        _ => Err(FORM.into()),
    }
}

fn number(text: &str, range: Number) -> Result<f64, String> {
    let number: f64 = text.trim().parse().map_err(|_| format!("\"{text}\" is not a number; {FORM}"))?;
    if range.allows(number) { Ok(number) } else { Err(format!("{number} is not a number {range}; {FORM}")) }
}

fn index(text: &str) -> Result<usize, String> {
    text.trim().parse().map_err(|_| format!("\"{text}\" is not a whole number of at least 0; {FORM}"))
}

#[cfg(test)]
mod tests {
    use ep_plan::presets;

    use super::*;

    #[test]
    fn stragglers_are_parsed() {
        let cluster = presets::datacenters(2, 100.0, 0.005, presets::dgx_h200(8));
        let read = |text: &str| parse(text, &cluster);
        assert_eq!(
            read("gpu:3=1.5, link:wan:1=2").unwrap(),
            Stragglers::Listed(vec![
                Straggler::Gpu { gpu: 3, slowdown: 1.5 },
                Straggler::Link { level: 0, link: 1, slowdown: 2.0 },
            ])
        );
        assert_eq!(read("random:0.05=1.3").unwrap(), Stragglers::Random { fraction: 0.05, slowdown: 1.3 });
        for wrong in [
            "",
            "gpu=2",
            "gpu:x=2",
            "gpu:3",
            "link:0=2",
            "disk:1=2",
            "random:many=2",
            "gpu:1=NaN",
            "random:2=2",
        ] {
            assert!(read(wrong).unwrap_err().contains("gpu:3=1.5"), "{wrong}");
        }
        assert!(read("link:lan:0=2").unwrap_err().contains("possible: wan, rail, nvlink"));
    }
}
