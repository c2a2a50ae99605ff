//! Plots, as SVG.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

const SIZE: (u32, u32) = (960, 540);
/// Told apart also by those who do not see all colours (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(90, 90, 90),
];

/// Bars that belong together, as those of one workload.
pub struct Group {
    /// What is written below.
    pub name: String,
    /// Name and height of each bar; a name has one colour in the whole plot.
    pub bars: Vec<(String, f64)>,
}

/// A line.
pub struct Curve {
    /// Name in the legend.
    pub name: String,
    /// Its points.
    pub points: Vec<(f64, f64)>,
}

fn failed(path: &Path) -> impl Fn(String) -> anyhow::Error + '_ {
    move |error| anyhow!("cannot draw {}: {error}", path.display())
}

/// Draws groups of bars.
///
/// # Errors
/// When the file cannot be written, or there is nothing to draw.
pub fn bars(path: &Path, title: &str, axis: &str, groups: &[Group]) -> Result<()> {
    draw_bars(path, title, axis, groups).map_err(|error| failed(path)(error.to_string()))
}

fn draw_bars(path: &Path, title: &str, axis: &str, groups: &[Group]) -> Result<(), Box<dyn std::error::Error>> {
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in groups.iter().flat_map(|group| &group.bars) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let top = groups.iter().flat_map(|group| &group.bars).map(|(_, value)| *value).fold(0.0, f64::max) * 1.12;
    if top <= 0.0 {
        return Err("nothing to draw".into());
    }
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(80)
        .build_cartesian_2d(0.0..groups.len() as f64, 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .light_line_style(WHITE)
        .y_desc(axis)
        .y_label_formatter(&|value| crate::report::count(*value))
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 14))
        .draw()?;
    let centred = ("sans-serif", 13).into_font().color(&BLACK).pos(plotters::style::text_anchor::Pos::new(
        plotters::style::text_anchor::HPos::Center,
        plotters::style::text_anchor::VPos::Top,
    ));
    let above = ("sans-serif", 11).into_font().color(&BLACK).pos(plotters::style::text_anchor::Pos::new(
        plotters::style::text_anchor::HPos::Center,
        plotters::style::text_anchor::VPos::Bottom,
    ));
    for (series, name) in names.iter().enumerate() {
        let colour = COLOURS[series % COLOURS.len()];
        let rectangles = groups.iter().enumerate().filter_map(|(at, group)| {
            let position = group.bars.iter().position(|(bar, _)| bar == name)?;
            let width = 0.86 / group.bars.len() as f64;
            let left = at as f64 + 0.07 + width * position as f64;
            let value = group.bars[position].1;
            Some((left, left + width * 0.92, value))
        });
        let rectangles: Vec<_> = rectangles.collect();
        chart
            .draw_series(
                rectangles
                    .iter()
                    .map(|(left, right, value)| Rectangle::new([(*left, 0.0), (*right, *value)], colour.filled())),
            )?
            .label(*name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], colour.filled()));
        chart.draw_series(rectangles.iter().map(|(left, right, value)| {
            Text::new(crate::report::count(*value), (f64::midpoint(*left, *right), *value), above.clone())
        }))?;
    }
    for (at, group) in groups.iter().enumerate() {
        let (x, y) = chart.backend_coord(&(at as f64 + 0.5, 0.0));
        area.draw(&Text::new(group.name.clone(), (x, y + 8), centred.clone()))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 13))
        .draw()?;
    area.present()?;
    Ok(())
}

/// Draws lines over a logarithmic vertical axis.
///
/// # Errors
/// When the file cannot be written, or there is nothing to draw.
pub fn curves(
    path: &Path,
    title: &str,
    axes: (&str, &str),
    x_text: &dyn Fn(&f64) -> String,
    y_text: &dyn Fn(&f64) -> String,
    curves: &[Curve],
) -> Result<()> {
    draw_curves(path, title, axes, x_text, y_text, curves).map_err(|error| failed(path)(error.to_string()))
}

fn draw_curves(
    path: &Path,
    title: &str,
    axes: (&str, &str),
    x_text: &dyn Fn(&f64) -> String,
    y_text: &dyn Fn(&f64) -> String,
    curves: &[Curve],
) -> Result<(), Box<dyn std::error::Error>> {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let range = |of: fn(&(f64, f64)) -> f64| {
        points().map(of).fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
    };
    let (x, y) = (range(|point| point.0), range(|point| point.1));
    if points().count() < 2 || x.0 >= x.1 || y.0 <= 0.0 {
        return Err("nothing to draw".into());
    }
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .margin_right(36)
        .x_label_area_size(48)
        .y_label_area_size(80)
        .build_cartesian_2d(x.0..x.1, (y.0 / 1.2..y.1 * 1.2).log_scale())?;
    chart
        .configure_mesh()
        .x_desc(axes.0)
        .y_desc(axes.1)
        .x_label_formatter(x_text)
        .y_label_formatter(y_text)
        .light_line_style(WHITE)
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 14))
        .draw()?;
    for (series, curve) in curves.iter().enumerate() {
        let colour = COLOURS[series % COLOURS.len()];
        chart
            .draw_series(LineSeries::new(curve.points.iter().copied(), colour.stroke_width(2)))?
            .label(curve.name.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 13))
        .draw()?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plots_name_what_they_show_and_refuse_to_show_nothing() {
        let path = std::env::temp_dir().join(format!("underpass-plot-{}.svg", std::process::id()));
        let group = |name: &str, value| Group {
            name: name.into(),
            bars: vec![("xdp".into(), value), ("socket".into(), value / 10.0)],
        };
        bars(&path, "A title", "requests", &[group("uniform", 2e6), group("zipf", 1e6)]).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        for part in ["A title", "requests", "uniform", "zipf", "xdp", "socket", "2.00 M", "</svg>"] {
            assert!(text.contains(part), "{part} is missing");
        }
        let curve = Curve { name: "reads".into(), points: vec![(0.0, 10.0), (1.0, 1000.0)] };
        let plain = |value: &f64| value.to_string();
        curves(&path, "Latency", ("percentile", "time"), &plain, &plain, &[curve]).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        for part in ["Latency", "percentile", "time", "reads"] {
            assert!(text.contains(part), "{part} is missing");
        }
        assert!(bars(&path, "t", "a", &[]).unwrap_err().to_string().contains("nothing to draw"));
        assert!(bars(Path::new("/no/p.svg"), "t", "a", &[group("u", 1.0)]).is_err());
        std::fs::remove_file(&path).unwrap();
    }
}
