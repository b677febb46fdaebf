//! The charts, as SVG.

use std::{fs, path::Path};

use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::{
    Error,
    figures::Series,
    measures::{ALWAYS, OURS, WITHOUT},
    report::{Report, number},
};

const SIZE: (u32, u32) = (820, 400);
const FONT: &str = "sans-serif";

const BLUE: RGBColor = RGBColor(38, 99, 172);
const GREY: RGBColor = RGBColor(138, 144, 153);
const ORANGE: RGBColor = RGBColor(214, 112, 32);
const LIGHT_BLUE: RGBColor = RGBColor(124, 170, 220);

/// One bar.
struct Bar {
    name: &'static str,
    value: f64,
    ours: bool,
}

/// Draws a chart for each measure of the report that has one.
pub(crate) fn draw(report: &Report, dir: &Path) -> Result<(), Error> {
    fs::create_dir_all(dir)?;
    let caption = format!("{} run on {}", report.size, report.machine.short());
    let median =
        |measure: &str, figure: &str| report.outcome(measure).and_then(|o| o.median_of(figure));
    let bar = |name, value: Option<f64>, ours| value.map(|value| Bar { name, value, ours });

    let drains = [
        bar("bare XADDs", median("drain_vs_limit", "limit"), false),
        bar("relay", median("drain_vs_limit", "relay"), true),
        bar(
            "relay, 100 topics",
            median("drain_topics", "100 topics"),
            true,
        ),
        bar(
            "relay, purging",
            median("drain_with_purge", "relay and purge"),
            true,
        ),
        bar(
            "loop, UPDATE",
            median("drain_vs_loop", "loop with UPDATE"),
            false,
        ),
        bar(
            "loop, DELETE",
            median("drain_with_purge", "loop with DELETE"),
            false,
        ),
    ];
    bars(
        &dir.join("drain.svg"),
        "Draining a backlog, rows/s",
        &caption,
        drains,
    )?;
    let producers =
        [WITHOUT, OURS, ALWAYS].map(|name| bar(name, median("producer_busy", name), name == OURS));
    bars(
        &dir.join("producers.svg"),
        "32 producers while the relay drains, transactions/s",
        &caption,
        producers,
    )?;

    if let Some(latency) = report.outcome("latency") {
        let axes = Axes {
            title: "From commit to XREAD, ms",
            x: "percentile",
            y: "ms",
        };
        lines(
            &dir.join("latency.svg"),
            &axes,
            &caption,
            &latency.series,
            Scale::UpTo(0.99),
        )?;
    }
    if let Some(held) = report.outcome("held_xmin") {
        let axes = Axes {
            title: "5,000 messages/s while a transaction stays open: published/s",
            x: "seconds",
            y: "messages/s",
        };
        lines(
            &dir.join("held_xmin.svg"),
            &axes,
            &caption,
            &held.series,
            Scale::UpTo(1.0),
        )?;
    }
    Ok(())
}

fn text(size: u32) -> TextStyle<'static> {
    (FONT, size).into_font().color(&BLACK)
}

/// Title and caption, drawn; returns what is left.
fn titled<'a>(
    root: &DrawingArea<SVGBackend<'a>, Shift>,
    title: &str,
    caption: &str,
) -> Result<DrawingArea<SVGBackend<'a>, Shift>, Error> {
    root.fill(&WHITE)?;
    root.draw_text(title, &text(18), (16, 12))?;
    root.draw_text(caption, &(FONT, 11).into_font().color(&GREY), (16, 36))?;
    Ok(root.margin(58, 14, 10, 26))
}

/// Bars side by side; nothing where none was measured.
fn bars<const N: usize>(
    path: &Path,
    title: &str,
    caption: &str,
    bars: [Option<Bar>; N],
) -> Result<(), Error> {
    let bars: Vec<Bar> = bars.into_iter().flatten().collect();
    if bars.is_empty() {
        return Ok(());
    }
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    let area = titled(&root, title, caption)?;
    let top = top_of(bars.iter().map(|bar| bar.value));
    let mut chart = ChartBuilder::on(&area)
        .x_label_area_size(28)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..bars.len() as f64, 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .y_labels(6)
        .y_label_formatter(&|value| number(*value))
        .light_line_style(WHITE)
        .draw()?;
    let centred = |vertical| Pos::new(HPos::Center, vertical);
    for (index, bar) in bars.iter().enumerate() {
        let (left, middle) = (index as f64 + 0.18, index as f64 + 0.5);
        let colour = if bar.ours { BLUE } else { GREY };
        chart.draw_series([Rectangle::new(
            [(left, 0.0), (left + 0.64, bar.value)],
            colour.filled(),
        )])?;
        let above = text(13).pos(centred(VPos::Bottom));
        chart.draw_series([Text::new(
            number(bar.value),
            (middle, bar.value + top * 0.015),
            above,
        )])?;
        let below = text(12).pos(centred(VPos::Top));
        chart.draw_series([Text::new(bar.name, (middle, -top * 0.02), below)])?;
    }
    root.present()?;
    Ok(())
}

struct Axes {
    title: &'static str,
    x: &'static str,
    y: &'static str,
}

/// Which part of the values decides how high a chart is; what is above is cut off.
#[derive(Clone, Copy)]
enum Scale {
    UpTo(f64),
}

fn lines(
    path: &Path,
    axes: &Axes,
    caption: &str,
    series: &[Series],
    scale: Scale,
) -> Result<(), Error> {
    let xs = || {
        series
            .iter()
            .flat_map(|series| &series.points)
            .map(|point| point.0)
    };
    let Some(right) = xs().max_by(f64::total_cmp) else {
        return Ok(());
    };
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    let area = titled(&root, axes.title, caption)?;
    let Scale::UpTo(part) = scale;
    let heights = series.iter().map(|series| height(series, part));
    let top = top_of(heights);
    let mut chart = ChartBuilder::on(&area)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..right, 0.0..top)?;
    chart
        .configure_mesh()
        .x_desc(axes.x)
        .y_desc(axes.y)
        .y_label_formatter(&|value| number(*value))
        .x_label_formatter(&|value| format!("{value:.0}"))
        .light_line_style(WHITE)
        .draw()?;
    for (series, colour) in series.iter().zip([BLUE, GREY, LIGHT_BLUE, ORANGE]) {
        let points = series.points.iter().map(|(x, y)| (*x, y.min(top)));
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
            .label(series.name.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(GREY)
        .label_font(text(12))
        .draw()?;
    root.present()?;
    Ok(())
}

/// The value that `part` of a series does not exceed.
fn height(series: &Series, part: f64) -> f64 {
    let values = crate::stats::sorted(
        &series
            .points
            .iter()
            .map(|point| point.1)
            .collect::<Vec<_>>(),
    );
    crate::stats::percentile(&values, part * 100.0)
}

/// A round number above all of the values, with room for their labels.
fn top_of(values: impl Iterator<Item = f64>) -> f64 {
    let highest = values.filter(|value| value.is_finite()).fold(0.0, f64::max) * 1.1;
    if highest <= 0.0 {
        return 1.0;
    }
    let step = 10_f64.powf(highest.log10().floor()) / 2.0;
    (highest / step).ceil() * step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_ends_at_a_round_number_above_its_values() {
        assert_eq!(top_of([80_000.0, 391_000.0].into_iter()), 450_000.0);
        assert_eq!(top_of([0.33].into_iter()), 0.4);
        assert_eq!(top_of([f64::NAN].into_iter()), 1.0);
    }

    #[test]
    fn bars_and_lines_become_svg() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (dir.path().join("bars.svg"), dir.path().join("lines.svg"));
        let bar = Bar {
            name: "relay",
            value: 250_000.0,
            ours: true,
        };
        bars(&first, "A title", "a machine", [Some(bar), None]).unwrap();
        let series = Series {
            name: "a line".to_owned(),
            points: vec![(0.0, 1.0), (10.0, 2.0)],
        };
        let axes = Axes {
            title: "Another",
            x: "x",
            y: "y",
        };
        lines(&second, &axes, "a machine", &[series], Scale::UpTo(1.0)).unwrap();
        let drawn = fs::read_to_string(first).unwrap();
        assert!(drawn.starts_with("<svg") && drawn.contains("250000") && drawn.contains("relay"));
        assert!(fs::read_to_string(second).unwrap().contains("a line"));
    }
}
