//! What a measure comes to.

use serde::Serialize;

use crate::stats::{Summary, summary};

/// What a figure must reach.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Target {
    AtLeast(f64),
    AtMost(f64),
}

impl Target {
    pub(crate) fn reached_by(self, median: f64) -> bool {
        match self {
            Target::AtLeast(bound) => median >= bound,
            Target::AtMost(bound) => median <= bound,
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::AtLeast(bound) => write!(f, ">= {bound}"),
            Target::AtMost(bound) => write!(f, "<= {bound}"),
        }
    }
}

/// One number of a measure, from all repetitions.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) name: String,
    /// Empty for a ratio.
    pub(crate) unit: &'static str,
    pub(crate) summary: Summary,
    pub(crate) samples: Vec<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) target: Option<Target>,
    /// Whether the median reaches the target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reached: Option<bool>,
}

impl Figure {
    fn new(
        name: impl Into<String>,
        unit: &'static str,
        samples: &[f64],
        target: Option<Target>,
    ) -> Self {
        let empty = Summary {
            median: f64::NAN,
            min: f64::NAN,
            max: f64::NAN,
        };
        let summary = summary(samples).unwrap_or(empty);
        Self {
            name: name.into(),
            unit,
            summary,
            samples: samples.to_vec(),
            target,
            reached: target.map(|target| target.reached_by(summary.median)),
        }
    }
}

/// Points of a chart that no single number shows.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// All of a measure.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Outcome {
    pub(crate) figures: Vec<Figure>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) series: Vec<Series>,
}

impl Outcome {
    /// Adds a figure that has a target.
    pub(crate) fn must(
        mut self,
        name: impl Into<String>,
        unit: &'static str,
        samples: &[f64],
        target: Target,
    ) -> Self {
        self.figures
            .push(Figure::new(name, unit, samples, Some(target)));
        self
    }

    /// Adds a figure that is only reported.
    pub(crate) fn beside(
        mut self,
        name: impl Into<String>,
        unit: &'static str,
        samples: &[f64],
    ) -> Self {
        self.figures.push(Figure::new(name, unit, samples, None));
        self
    }

    pub(crate) fn with_series(mut self, series: Vec<Series>) -> Self {
        self.series = series;
        self
    }

    /// The median of a figure, by its name.
    pub(crate) fn median_of(&self, name: &str) -> Option<f64> {
        let figure = self.figures.iter().find(|figure| figure.name == name)?;
        Some(figure.summary.median)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_met_at_its_bound() {
        assert!(Target::AtLeast(0.55).reached_by(0.55));
        assert!(!Target::AtLeast(0.55).reached_by(0.549));
        assert!(Target::AtMost(2.0).reached_by(2.0));
        assert!(!Target::AtMost(2.0).reached_by(f64::NAN));
    }

    #[test]
    fn the_median_decides() {
        let outcome = Outcome::default().must("ratio", "", &[0.1, 0.9, 0.8], Target::AtLeast(0.5));
        assert_eq!(outcome.figures[0].reached, Some(true));
        let json = serde_json::to_value(&outcome).unwrap();
        assert_eq!(json["figures"][0]["summary"]["median"], 0.8);
        assert_eq!(json["figures"][0]["target"]["at_least"], 0.5);
    }
}
