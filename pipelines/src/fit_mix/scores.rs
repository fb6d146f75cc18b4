//! How well classes are predicted.

use super::entities::{Tag, entities};

/// What is measured. The first measure chooses the best pass of a fit, and the best seed.
#[derive(Debug)]
pub(super) enum Scorer {
    /// Entities, and the tokens whose tags are right.
    Entities(Vec<Tag>),
    /// Labels, of which there are so many.
    Classes(usize),
}

impl Scorer {
    /// Entities if all labels are tags of entities.
    pub(super) fn of_tags(labels: &[String]) -> Self {
        let tags: Option<Vec<Tag>> = labels.iter().map(|label| Tag::parse(label)).collect();
        tags.map_or(Self::Classes(labels.len()), Self::Entities)
    }

    /// The measures, as the keys of the report.
    pub(super) fn measures(&self) -> &'static [&'static str] {
        match self {
            Self::Entities(_) => &["entity_f1", "precision", "recall", "accuracy"],
            Self::Classes(_) => &["accuracy", "macro_f1"],
        }
    }

    /// The scores, 0 to 1, in the order of [`Scorer::measures`].
    pub(super) fn score<'s>(&self, gold: impl Iterator<Item = &'s [u32]>, predicted: &[Vec<u32>]) -> Vec<f64> {
        let pairs: Vec<Pair<'_>> = gold.zip(predicted.iter().map(Vec::as_slice)).collect();
        let accuracy = accuracy(&pairs);
        match self {
            Self::Classes(classes) => vec![accuracy, macro_f1(&pairs, *classes)],
            Self::Entities(tags) => {
                let found = found(&pairs, tags);
                vec![found.f1(), found.precision(), found.recall(), accuracy]
            }
        }
    }
}

/// The labels of an example, and those that were predicted.
type Pair<'p> = (&'p [u32], &'p [u32]);

fn ratio(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn accuracy(pairs: &[Pair<'_>]) -> f64 {
    let (mut right, mut all) = (0, 0);
    for (gold, predicted) in pairs {
        right += gold.iter().zip(*predicted).filter(|(gold, predicted)| gold == predicted).count();
        all += gold.len();
    }
    ratio(right, all)
}

/// Counts of one kind of thing. A measure without a denominator is 0, as in conlleval and scikit-learn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Found {
    right: usize,
    gold: usize,
    predicted: usize,
}

impl Found {
    fn precision(self) -> f64 {
        ratio(self.right, self.predicted)
    }

    fn recall(self) -> f64 {
        ratio(self.right, self.gold)
    }

    fn f1(self) -> f64 {
        ratio(2 * self.right, self.gold + self.predicted)
    }
}

/// Entities of all types together: one is right if its type and its tokens are.
fn found(pairs: &[Pair<'_>], tags: &[Tag]) -> Found {
    let mut all = Found::default();
    for (gold, predicted) in pairs {
        let [gold, predicted] = [gold, predicted]
            .map(|labels| entities(labels.iter().map(|label| tags.get(*label as usize).unwrap_or(&Tag::Outside))));
        all.right += gold.iter().filter(|entity| predicted.contains(entity)).count();
        all.gold += gold.len();
        all.predicted += predicted.len();
    }
    all
}

/// The mean of the F1 of each class that occurs among the labels or the predictions.
fn macro_f1(pairs: &[Pair<'_>], classes: usize) -> f64 {
    let mut by_class = vec![Found::default(); classes];
    for (gold, predicted) in pairs.iter().flat_map(|(gold, predicted)| gold.iter().zip(*predicted)) {
        let mut count = |class: u32, add: fn(&mut Found)| by_class.get_mut(class as usize).into_iter().for_each(add);
        count(*gold, |found| found.gold += 1);
        count(*predicted, |found| found.predicted += 1);
        if gold == predicted {
            count(*gold, |found| found.right += 1);
        }
    }
    let occurring: Vec<f64> =
        by_class.iter().filter(|found| found.gold + found.predicted > 0).map(|f| f.f1()).collect();
    occurring.iter().sum::<f64>() / occurring.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(scorer: &Scorer, gold: &[Vec<u32>], predicted: &[Vec<u32>]) -> Vec<f64> {
        scorer.score(gold.iter().map(Vec::as_slice), predicted)
    }

    /// Tags by words, and the numbers of their labels.
    fn tagged(labels: &mut Vec<String>, text: &str) -> Vec<u32> {
        let mut number = |tag: &str| match labels.iter().position(|label| label == tag) {
            Some(number) => number as u32,
            None => {
                labels.push(tag.to_owned());
                labels.len() as u32 - 1
            }
        };
        text.split(' ').map(&mut number).collect()
    }

    /// By hand. Sentence 1: gold per 0-2 and loc 3-4, predicted per 0-2 and loc 3-5, one right. Sentence 2: gold org 0-2,
    /// predicted org 0-2 by I without B, right. Sentence 3: gold per 1-2, predicted loc 1-2. So 2 are right of 4 gold and 4
    /// predicted ones. Of the 10 tags, those of token 4 of sentence 1, token 0 of sentence 2 and token 1 of sentence 3 are wrong.
    #[test]
    fn entities_are_right_as_a_whole() {
        let mut labels = Vec::new();
        let gold: Vec<_> = ["B-per I-per O B-loc O", "B-org I-org O", "O B-per"].map(|s| tagged(&mut labels, s)).into();
        let predicted: Vec<_> =
            ["B-per I-per O B-loc I-loc", "I-org I-org O", "O B-loc"].map(|s| tagged(&mut labels, s)).into();
        let scorer = Scorer::of_tags(&labels);
        assert_eq!(scorer.measures(), ["entity_f1", "precision", "recall", "accuracy"]);
        assert_eq!(scores(&scorer, &gold, &predicted), [0.5, 0.5, 0.5, 0.7]);
        assert_eq!(scores(&scorer, &gold, &gold), [1.0; 4]);
    }

    /// By hand: 1 of 3 predicted entities and of 2 gold ones is right: F1 is 2 / (3 + 2).
    #[test]
    fn precision_and_recall_differ() {
        let mut labels = Vec::new();
        let gold = vec![tagged(&mut labels, "B-a B-a O O")];
        let predicted = vec![tagged(&mut labels, "B-a O B-a B-a")];
        let found = scores(&Scorer::of_tags(&labels), &gold, &predicted);
        assert_eq!(found, [0.4, 1.0 / 3.0, 0.5, 0.25]);
        let none = vec![tagged(&mut labels, "O O O O")];
        assert_eq!(scores(&Scorer::of_tags(&labels), &gold, &none)[..3], [0.0; 3]);
    }

    /// By hand: class 0 has 2 right of 3 gold and 3 predicted, F1 2/3; class 1 has 1 of 2 and 3, F1 2/5; class 2 has 0 of 1 and 0,
    /// F1 0; class 3 never occurs. The mean is 16/45; 3 of 6 are right.
    #[test]
    fn macro_f1_is_the_mean_over_classes_that_occur() {
        let gold: Vec<Vec<u32>> = [0, 0, 0, 1, 1, 2].map(|label| vec![label]).into();
        let predicted: Vec<Vec<u32>> = [0, 0, 1, 1, 0, 1].map(|label| vec![label]).into();
        let found = scores(&Scorer::Classes(4), &gold, &predicted);
        assert_eq!(found[0], 0.5);
        assert!((found[1] - 16.0 / 45.0).abs() < 1e-15, "{found:?}");
    }

    #[test]
    fn other_labels_than_tags_of_entities_are_classes() {
        let labels = ["NN", "B-x"].map(str::to_owned);
        assert_eq!(Scorer::of_tags(&labels).measures(), ["accuracy", "macro_f1"]);
    }
}
