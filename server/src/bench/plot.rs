//! A picture of the KV cache over time: what share of the pool is held, and what share is live.

use super::report::{KvReport, Run};
use std::fmt::Write as _;

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 200.0;
/// Room for titles and axes: left, above and below each run's chart.
const LEFT: f64 = 60.0;
const ABOVE: f64 = 40.0;
const BELOW: f64 = 30.0;

/// One chart a run, all over the same time, as SVG.
pub fn svg(runs: &[Run]) -> String {
    let longest = runs.iter().map(|run| run.duration).fold(0.0, f64::max).max(1e-9);
    let chart = ABOVE + HEIGHT + BELOW;
    let (width, height) = (LEFT + WIDTH + 20.0, chart * runs.len() as f64);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    for (i, run) in runs.iter().enumerate() {
        push_chart(&mut text, run, (chart * i as f64 + ABOVE, longest));
    }
    text.push_str("</svg>\n");
    text
}

fn push_chart(text: &mut String, run: &Run, (top, seconds): (f64, f64)) {
    let bottom = top + HEIGHT;
    let right = LEFT + WIDTH;
    let kv = &run.kv_cache;
    let held =
        |held_blocks: usize| (held_blocks * run.config.block_size) as f64 / kv.pool_tokens as f64;
    let held = curve(kv, (top, seconds), |i| held(kv.over_time[i].held_blocks));
    let live = curve(kv, (top, seconds), |i| kv.over_time[i].live_of_pool);
    let _ = write!(
        text,
        "<text x=\"{LEFT}\" y=\"{}\">{}: KV cache of {} tokens; \
         <tspan fill=\"#c60\">held</tspan>, <tspan fill=\"#06c\">live</tspan> \
         (mean {:.1} % of the pool)</text>\n\
         <path d=\"M{LEFT} {top}V{bottom}H{right}\" fill=\"none\" stroke=\"black\"/>\n\
         <text x=\"{}\" y=\"{}\" text-anchor=\"end\">100 %</text>\n\
         <text x=\"{}\" y=\"{bottom}\" text-anchor=\"end\">0</text>\n\
         <text x=\"{right}\" y=\"{}\" text-anchor=\"end\">{seconds:.1} s</text>\n\
         <polyline points=\"{held}\" fill=\"none\" stroke=\"#c60\"/>\n\
         <polyline points=\"{live}\" fill=\"none\" stroke=\"#06c\"/>\n",
        top - 12.0,
        escape(&run.name),
        kv.pool_tokens,
        100.0 * kv.live_of_pool,
        LEFT - 6.0,
        top + 10.0,
        LEFT - 6.0,
        bottom + 18.0,
    );
}

/// The points of a share of 0 to 1 over time, from its start at 0.
fn curve(kv: &KvReport, (top, seconds): (f64, f64), share: impl Fn(usize) -> f64) -> String {
    let mut points = format!("{LEFT:.1},{:.1}", top + HEIGHT);
    for (i, moment) in kv.over_time.iter().enumerate() {
        let x = LEFT + WIDTH * moment.t_s / seconds;
        let y = top + HEIGHT * (1.0 - share(i));
        let _ = write!(points, " {x:.1},{y:.1}");
    }
    points
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::drive::KvPoint;
    use super::*;

    #[test]
    fn shares_become_heights() {
        let point = |t_s, live_of_pool| KvPoint { t_s, live_of_pool, ..KvPoint::default() };
        let kv = KvReport {
            pool_tokens: 16,
            peak_blocks: 1,
            live_of_pool: 0.5,
            live_of_held: 1.0,
            waste_per_sequence: 0.0,
            expected_waste: 0.0,
            over_time: vec![point(5.0, 0.5), point(10.0, 1.0)],
        };
        let points = curve(&kv, (40.0, 10.0), |i| kv.over_time[i].live_of_pool);
        assert_eq!(points, "60.0,240.0 460.0,140.0 860.0,40.0");
        assert_eq!(escape("a<b>&c"), "a&lt;b&gt;&amp;c");
    }
}
