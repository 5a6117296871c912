//! These tests check reports as text, JSON and HTML.

use serde_json::Value;

use crate::common::{Directory, run};
use crate::{REFERENCE, assert_well_formed, planned, written};

/// An EP group of one GPU, domains that cannot grow, and copies of experts.
#[test]
fn the_report_fits_its_layout() {
    let directory = Directory::new("plan-small");
    let page = directory.file("page.html");
    let one =
        ["--model=mixtral-8x7b", "--datacenters=1", "--nodes=1", "--gpus-per-node=1", "--set=memory=2000GB"];
    let args = ["plan", "--explain", "--html", &page];
    let text = run(&[&args[..], &one].concat()).succeeded().stdout;
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(text.contains("an EP group is one GPU, so neither experts nor tokens move"), "{text}");
    assert!(!text.contains(" 0.0 %") && text.contains("No domain can have one more member"), "{text}");
    assert!(text.contains("A datacenter below is a member of 'rail', the outermost level."), "{text}");
    assert!(html.contains("neither experts nor tokens move") && !html.contains("the 1 domains"), "{html}");
    let sites = ["--model=mixtral-8x7b", "--datacenters=3", "--nodes=2,2,1", "--strategy=expert-domains"];
    run(&[&args[..], &sites].concat()).succeeded();
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(!html.contains("the 1 domains") && !html.contains(".. "), "{html}");
    // 8 experts on EP groups of 6 GPUs have 12 slots.
    let copies =
        ["plan", "--model=mixtral-8x7b", "--set=members.wan=3", "--explain", "--strategy=hierarchical-ep"];
    let text = run(&copies).succeeded().stdout;
    assert!(text.contains("experts and copies worth moving") && text.contains(" of 12 "), "{text}");
    assert!(text.contains("2 x (8 x DGX H200), 3 members of 'wan': 192 GPUs\n"), "{text}");
    assert!(text.contains("2 experts of a layer on each GPU"), "{text}");
}

#[test]
fn the_html_report_lists_strategies_that_do_not_fit() {
    let directory = Directory::new("plan-html-fit");
    let file = directory.file("plan.html");
    let text = run(&["plan", "--datacenters", "8", "--nodes", "2", "--html", &file]).succeeded().stdout;
    let html = std::fs::read_to_string(&file).unwrap();
    for strategy in ["data parallelism", "local steps"] {
        assert!(text.lines().any(|line| line.contains(strategy) && line.contains("does not fit")), "{text}");
        assert!(html.contains(&format!("<td>{strategy}</td><td>does not fit</td>")), "{strategy}");
    }
}

#[test]
fn the_html_report_loads_nothing() {
    let directory = Directory::new("plan-html");
    let name = "<b> & \"quoted\"";
    let file = written(&directory, "named.toml", &REFERENCE.replace("\"reference\"", "'<b> & \"quoted\"'"));
    for (report, options) in [
        ("training.html", vec!["--set", "work=training", "--sweep", "round_trip=0ms..50ms:4"]),
        ("paper.html", vec!["--paper-model"]),
        ("plain.html", vec!["--set", "bandwidth=100Tbit/s", "--set", "weight_compression=1"]),
    ] {
        let report = directory.file(report);
        run(&[&["plan", "--cluster", &file, "--html", &report], &options[..]].concat()).succeeded();
        let html = std::fs::read_to_string(&report).unwrap();
        assert!(html.starts_with("<!DOCTYPE html>") && html.ends_with("</html>\n"));
        for outside in ["src=", "href=", "url(", "@import", "<script", "<link"] {
            assert!(!html.contains(outside), "{outside} in {report}");
        }
        // The namespace of SVG is a name, not an address that is loaded.
        let places = html.replace("http://www.w3.org/2000/svg", "");
        assert!(!places.contains("http:") && !places.contains("https:"));
        assert!(!html.contains(name) && html.contains("&lt;b&gt; &amp; &quot;quoted&quot;"));
        let charts: Vec<&str> =
            html.split("<svg").skip(1).map(|rest| rest.split("</svg>").next().unwrap()).collect();
        assert!(charts.len() >= 5, "{} charts", charts.len());
        charts.iter().for_each(|chart| assert_well_formed(&format!("<svg{chart}</svg>")));
        for title in ["Expert domains", "Time by phase", "Compared", "Bytes per link", "Memory"] {
            assert!(html.contains(&format!("<h2>{title}</h2>")), "{title}");
        }
    }
}

/// Text, JSON and HTML name the codec of dense gradients, say whether it is lossy, and list the strategies that have it.
#[test]
fn the_codec_of_dense_gradients_is_reported() {
    let directory = Directory::new("plan-dense");
    let file = written(
        &directory,
        "dense.toml",
        &REFERENCE
            .replace("work = \"forward\"", "work = \"training\"\ndense_gradient_compression = \"topk:0.25\""),
    );
    let report = |options: &[&str]| {
        let [json, html] = ["report.json", "report.html"].map(|name| directory.file(name));
        let all = [&["plan", "--cluster", &file, "--json", &json, "--html", &html], options].concat();
        let all = [&all[..], &["--strategy=data-parallel"]].concat();
        let text = run(&all).succeeded().stdout;
        let json: Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
        (text, json, std::fs::read_to_string(html).unwrap())
    };
    for (set, codec, lossy) in [
        (None, "topk:0.25", true),
        (Some("int8"), "int8", true),
        (Some("topk:1"), "topk:1", true),
        (Some("exact"), "exact", false),
    ] {
        let set: Vec<String> =
            set.iter().map(|codec| format!("--set=dense_gradient_compression={codec}")).collect();
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let (text, json, html) = report(&set);
        let so = if lossy { ", which is lossy" } else { "" };
        let prices = json["step"]["prices"].as_array().unwrap();
        let strategies = |crossing: bool| {
            let of = prices.iter().filter(|price| price["dense_exchange"].is_object() == crossing);
            let words = of.map(|price| match price["strategy"].as_str().unwrap() {
                "data-parallel" => "data parallelism".to_owned(),
                other => other.replace('-', " ").replace(" ep", " EP"),
            });
            words.collect::<Vec<_>>().join(", ")
        };
        let line =
            format!("Dense gradients between datacenters are priced as `{codec}`{so}: {}.", strategies(true));
        let html = html.replace("<code>", "`").replace("</code>", "`");
        assert!(text.contains(&line) && html.contains(&line), "{line}\n{text}");
        let others = format!("Without dense gradients between datacenters: {}.", strategies(false));
        assert!(text.contains(&others) && html.contains(&others), "{others}\n{text}");
        let named = format!("dense gradients between datacenters {codec}");
        assert_eq!((text.contains(&named), html.contains(&named)), (lossy, lossy), "{text}");
        assert_eq!(text.matches("  lossy dense gradients").count(), if lossy { 3 } else { 0 }, "{text}");
        assert_eq!(json["problem"]["options"]["dense_gradient_compression"], codec);
        for price in prices {
            let name = price["strategy"].as_str().unwrap();
            let crosses = !matches!(name, "pipeline" | "local-steps");
            assert_eq!(price["dense_exchange"]["codec"].as_str(), crosses.then_some(codec), "{price}");
        }
        // The problem of the HTML report can be planned again.
        let print = [&["plan", "--cluster", &file, "--print-toml"], &set[..]].concat();
        let printed = run(&print).succeeded().stdout;
        assert!(printed.contains(&format!("\ndense_gradient_compression = \"{codec}\"")), "{printed}");
        assert!(html.contains(&format!("dense_gradient_compression = &quot;{codec}&quot;")));
    }
    let without = written(&directory, "without.toml", &REFERENCE.replace("\"forward\"", "\"training\""));
    let text = run(&["plan", "--cluster", &without]).succeeded().stdout;
    assert!(!text.to_lowercase().contains("dense gradients"), "{text}");
    assert!(!planned(&["--cluster", &without])["step"].to_string().contains("dense_exchange"));
    let steps = run(&["simulate", "--steps", "--cluster", &file, "--set=global_batch=1048576"]).succeeded();
    assert!(steps.stdout.contains("are priced as `topk:0.25`, which is lossy"), "{}", steps.stdout);
}
