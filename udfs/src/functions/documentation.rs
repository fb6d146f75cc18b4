//! The documentation of the functions with options, which `docs/functions.md` is generated from.

use datafusion::logical_expr::{DocSection, Documentation};

use crate::args::Parameters;

/// What every function says about its text.
pub(super) const TEXT: &str =
    "A string in any Arrow encoding, a binary that holds UTF-8, or a list of tokens, which is one sentence.";

/// The documentation of a function. `columns` describes the parameters that are columns; the options have the same
/// description in all functions.
pub(super) fn document(parameters: &Parameters, description: &str, example: &str, columns: &[&str]) -> Documentation {
    let section = DocSection { include: true, label: "ELMo Functions", description: None };
    let (names, options) = parameters.names.split_at(parameters.columns);
    let options: Vec<(&str, &str)> = options.iter().map(|name| (*name, option(name))).collect();
    let named: Vec<String> = options.iter().map(|(name, _)| format!("{name} => ")).collect();
    let syntax = format!("{}({} [, {}])", parameters.function, names.join(", "), named.join(", "));
    let arguments = names.iter().copied().zip(columns.iter().copied()).chain(options);
    let documented =
        Documentation::builder(section, description, syntax).with_sql_example(format!("```sql\n> {example}\n```"));
    arguments.fold(documented, |documented, (name, text)| documented.with_argument(name, text)).build()
}

fn option(name: &str) -> &'static str {
    match name {
        "layers" => {
            "The layers: `'average'` (default), `'top'`, `'token'`, the number of a layer, or `'all'`, which concatenates all layers."
        }
        "pooling" => {
            "How token vectors are combined: `'mean'` (default), `'max'`, `'first'`, `'last'`, or `'ends'`, which is the forward half of the last token and the backward half of the first."
        }
        "model" => "The name of a registered model. The default is the session's default model.",
        "tokenizer" => "The tokenizer: `'moses'` (default), `'words'` or `'whitespace'`.",
        "sentences" => "How sentences are found: `'split'` (default), or `'off'` if each text is one sentence.",
        "state" => "The state of the LSTMs at the start of a sentence: `'zero'` (default) or `'warm'`.",
        "on_long" => {
            "What to do with a sentence of more than 512 tokens: `'window'` (default), `'truncate'` or `'error'`."
        }
        "on_error" => "What to do with a text that cannot be embedded: `'fail'` (default) or `'null'`.",
        _ => "",
    }
}
