//! The reference of the functions over texts. The descriptions of the options are shared by all of them.

use datafusion::logical_expr::{DocSection, Documentation};

use crate::args::Parameters;

/// The section of all functions of this crate.
const SECTION: DocSection = DocSection { include: true, label: "ELMo Functions", description: None };

/// The description of an argument that is a text.
pub(crate) const TEXT: &str = "A text, in any Arrow encoding: a string or a binary (UTF-8), or a list of strings, which \
                               are the tokens of one sentence.";

/// The options of the functions over texts: name and description. Each function has some of them.
pub const OPTIONS: [(&str, &str); 10] = [
    (
        "layers",
        "The layers: `'average'` (default), `'top'`, `'token'`, the number of a layer, `'all'`, which concatenates all \
         layers, `'mix'`, the scalar mix in the model's folder (`mix.json`), or the name of a registered scalar mix.",
    ),
    (
        "pooling",
        "How token vectors are combined: `'mean'` (default), `'max'`, `'first'`, `'last'`, or `'ends'`, which is the \
         forward half of the last token and the backward half of the first.",
    ),
    ("model", "The name of a registered model. The default is the session's default model."),
    (
        "tokenizer",
        "The tokenizer: `'moses'`, `'words'` or `'whitespace'`. Default: the one that the model records, else `'moses'`.",
    ),
    (
        "sentences",
        "How sentences are found: `'split'`, or `'off'` if each text is one sentence; by default as the model records, else `'split'`.",
    ),
    (
        "state",
        "The state of the LSTMs at the start of a sentence: `'zero'` or `'warm'`; by default the one that the model records, else `'zero'`.",
    ),
    (
        "on_long",
        "What to do with a sentence of more than `max_tokens` tokens: `'window'` (default), `'truncate'` or `'error'`.",
    ),
    ("on_error", "What to do with a text that cannot be embedded or scored: `'fail'` (default) or `'null'`."),
    (
        "normalize",
        "The scale of vectors: `'off'` (default), or `'l2'` for unit length. Scales the vector of the text, or where there \
         is one vector per token, each of those; with `layers => 'all'`, each layer separately.",
    ),
    ("max_tokens", "The maximum number of tokens of a sentence, a whole number of at least 1. The default is 512."),
];

/// The documentation of a function over texts.
///
/// `forms` are the lists of parameters that it accepts, `arguments` the descriptions of the parameters that are not in
/// [`OPTIONS`], and `example` is a query.
pub(crate) fn document(
    forms: &[&Parameters],
    description: &str,
    arguments: &[(&str, &str)],
    example: &str,
) -> Documentation {
    let syntax: Vec<String> = forms.iter().map(|form| syntax(form)).collect();
    let example = format!("```sql\n> {example}\n```");
    let options = OPTIONS.iter().filter(|(name, _)| forms.iter().any(|form| form.options().contains(name)));
    arguments
        .iter()
        .chain(options)
        .fold(Documentation::builder(SECTION, description, syntax.join(" or ")), |builder, (name, description)| {
            builder.with_argument(*name, *description)
        })
        .with_sql_example(example)
        .build()
}

fn syntax(form: &Parameters) -> String {
    let options: Vec<String> = form.options().iter().map(|name| format!("{name} => ")).collect();
    format!("{}({} [, {}])", form.function, form.names[..form.columns].join(", "), options.join(", "))
}
