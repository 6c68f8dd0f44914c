//! A plot as SVG: one line over a logarithmic axis.

use std::fmt::Write as _;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 50.0;
const TOP: f64 = 30.0;
const RIGHT: f64 = 30.0;

/// Draws points with x above zero, in order.
pub(crate) fn draw(x_name: &str, y_name: &str, points: &[(f64, f64)]) -> String {
    let most = points.iter().fold(0.0_f64, |most, (_, y)| most.max(*y)).max(1.0) * 1.1;
    let (first, last) =
        (points.first().map_or(1.0, |(x, _)| x.log10()), points.last().map_or(1.0, |(x, _)| x.log10()));
    let span = (last - first).max(0.1);
    let at = |x: f64, y: f64| {
        let right = LEFT + (x.log10() - first) / span * (WIDTH - LEFT - RIGHT);
        (right, HEIGHT - BOTTOM - y / most * (HEIGHT - BOTTOM - TOP))
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    for step in 0..=4 {
        let value = most * f64::from(step) / 4.0;
        let (_, y) = at(1.0, value);
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>",
            WIDTH - RIGHT
        );
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{value:.0}</text>",
            LEFT - 8.0,
            y + 4.0
        );
    }
    let line: Vec<String> =
        points.iter().map(|(x, y)| at(*x, *y)).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"#0b62a4\" stroke-width=\"2\"/>",
        line.join(" ")
    );
    for (x, y) in points {
        let (right, down) = at(*x, *y);
        let _ = writeln!(svg, "<circle cx=\"{right:.1}\" cy=\"{down:.1}\" r=\"3\" fill=\"#0b62a4\"/>");
        let _ = writeln!(
            svg,
            "<text x=\"{right:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{y:.0}</text>",
            down - 8.0
        );
        let below = HEIGHT - BOTTOM + 18.0;
        let _ = writeln!(svg, "<text x=\"{right:.1}\" y=\"{below}\" text-anchor=\"middle\">{x:.0}</text>");
    }
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{x_name}</text>",
        WIDTH / 2.0,
        HEIGHT - 10.0
    );
    let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"18\">{y_name}</text>\n</svg>");
    svg
}
