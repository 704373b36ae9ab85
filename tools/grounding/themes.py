"""How each style sheet wants its components written: templates, and the classes that vary.

A template's fields in braces are filled by `pages`. `{v}` is one of the theme's variants, a class
that colours the component. Plain HTML has no classes; `pages` writes a random style for it.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Theme:
    """One way to write the components."""

    name: str
    templates: Mapping[str, str]
    variants: tuple[str, ...] = ("",)
    dark: str = ""  # attribute of <html> that is "dark" or "light"; empty: it has none
    root_px: tuple[float, float] = (9.0, 14.0)  # font size of the page, lowest and highest


_PLAIN = {
    "button": '<button type="button" style="{style}">{text}</button>',
    "buttons": '<div class="row">{items}</div>',
    "icon": '<button type="button" class="icon" aria-label="{text}">{icon}</button>',
    "link": '<a href="#">{text}</a>',
    "field": '<div class="field"><label for="{id}">{label}</label>{control}</div>',
    "input": '<input id="{id}" type="{type}" value="{value}" placeholder="{hint}">',
    "textarea": '<textarea id="{id}" rows="2">{value}</textarea>',
    "select": '<select id="{id}">{options}</select>',
    "checkbox": '<div><label><input type="checkbox"{checked}> {text}</label></div>',
    "radio": '<div><label><input type="radio" name="{group}"{checked}> {text}</label></div>',
    "range": '<input id="{id}" type="range" value="{number}">',
    "tabs": '<div class="tabs" role="tablist">{items}</div>',
    "tab": '<button type="button" role="tab" class="tab{active}">{text}</button>',
    "menu": '<ul class="menu" role="menu">{items}</ul>',
    "menuitem": '<li role="menuitem" tabindex="-1">{text}</li>',
    "nav": '<nav class="row">{items}</nav>',
    "navlink": '<a href="#">{text}</a>',
    "table": '<table class="{more}"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>',
    "card": '<section class="card"><h3>{title}</h3>{body}</section>',
    "heading": "<h2>{text}</h2>",
    "paragraph": "<p>{body}</p>",
}
PLAIN = Theme("plain", _PLAIN)
PICO = Theme(
    "pico",
    {
        **_PLAIN,
        "button": '<button type="button" class="{v}">{text}</button>',
        "buttons": '<div class="inline">{items}</div>',
        "icon": '<button type="button" class="{v} icon" aria-label="{text}">{icon}</button>',
        "field": '<label for="{id}">{label}</label>{control}',
        "checkbox": '<label><input type="checkbox"{checked}> {text}</label>',
        "radio": '<label><input type="radio" name="{group}"{checked}> {text}</label>',
        "tabs": '<div role="group">{items}</div>',
        "tab": '<button type="button" role="tab" class="secondary {active_outline}">{text}'
        "</button>",
        "nav": "<nav><ul>{items}</ul></nav>",
        "navlink": '<li><a href="#">{text}</a></li>',
        "menu": "<aside><nav><ul>{items}</ul></nav></aside>",
        "menuitem": '<li><a href="#" role="menuitem">{text}</a></li>',
        "table": '<table class="striped"><thead><tr>{heads}</tr></thead>'
        "<tbody>{rows}</tbody></table>",
        "card": "<article><header>{title}</header>{body}</article>",
    },
    variants=("", "secondary", "contrast", "outline", "outline secondary"),
    dark="data-theme",
)
BOOTSTRAP = Theme(
    "bootstrap",
    {
        "button": '<button type="button" class="btn btn-{v} {size}">{text}</button>',
        "buttons": '<div class="d-flex flex-wrap gap-1 mb-2">{items}</div>',
        "icon": '<button type="button" class="btn btn-{v} btn-sm" aria-label="{text}">{icon}'
        "</button>",
        "link": '<a href="#" class="link-{v}">{text}</a>',
        "field": '<div class="mb-2"><label class="form-label mb-0" for="{id}">{label}</label>'
        "{control}</div>",
        "input": '<input id="{id}" type="{type}" class="form-control {control_size}" '
        'value="{value}" placeholder="{hint}">',
        "textarea": '<textarea id="{id}" class="form-control" rows="2">{value}</textarea>',
        "select": '<select id="{id}" class="form-select {control_size}">{options}</select>',
        "checkbox": '<div class="form-check {switch}"><input class="form-check-input" '
        'type="checkbox" id="{id}"{role}{checked}>'
        '<label class="form-check-label" for="{id}">{text}</label></div>',
        "radio": '<div class="form-check"><input class="form-check-input" type="radio" '
        'name="{group}" id="{id}"{checked}>'
        '<label class="form-check-label" for="{id}">{text}</label></div>',
        "range": '<input id="{id}" type="range" class="form-range" value="{number}">',
        "tabs": '<ul class="nav nav-{tabs_look} mb-2" role="tablist">{items}</ul>',
        "tab": '<li class="nav-item" role="presentation"><button type="button" role="tab" '
        'class="nav-link{active}">{text}</button></li>',
        "menu": '<ul class="dropdown-menu show position-static mb-2" role="menu">{items}</ul>',
        "menuitem": '<li><a class="dropdown-item" role="menuitem" href="#">{text}</a></li>',
        "nav": '<ul class="pagination pagination-sm mb-2">{items}</ul>',
        "navlink": '<li class="page-item"><a class="page-link" href="#">{text}</a></li>',
        "table": '<table class="table table-sm {more}"><thead><tr>{heads}</tr></thead>'
        "<tbody>{rows}</tbody></table>",
        "card": '<div class="card mb-2"><div class="card-header p-1">{title}</div>'
        '<div class="card-body p-1">{body}</div></div>',
        "heading": '<h2 class="h5">{text}</h2>',
        "paragraph": '<p class="mb-2">{body}</p>',
    },
    variants=(
        *("primary", "secondary", "success", "danger", "warning", "info", "light", "dark"),
        *("outline-primary", "outline-danger", "outline-success"),
    ),
    dark="data-bs-theme",
)
BULMA = Theme(
    "bulma",
    {
        "button": '<button type="button" class="button is-{v} {size}">{text}</button>',
        "buttons": '<div class="buttons are-small">{items}</div>',
        "icon": '<button type="button" class="button is-{v} is-small" aria-label="{text}">{icon}'
        "</button>",
        "link": '<a href="#">{text}</a>',
        "field": '<div class="field"><label class="label is-small" for="{id}">{label}</label>'
        '<div class="control">{control}</div></div>',
        "input": '<input id="{id}" type="{type}" class="input is-small" value="{value}" '
        'placeholder="{hint}">',
        "textarea": '<textarea id="{id}" class="textarea is-small" rows="2">{value}</textarea>',
        "select": '<div class="select is-small"><select id="{id}">{options}</select></div>',
        "checkbox": '<div><label class="checkbox"><input type="checkbox"{checked}> {text}</label>'
        "</div>",
        "radio": '<div><label class="radio"><input type="radio" name="{group}"{checked}> {text}'
        "</label></div>",
        "range": '<input id="{id}" type="range" value="{number}">',
        "tabs": '<div class="tabs is-small {tabs_box}"><ul role="tablist">{items}</ul></div>',
        "tab": '<li class="{is_active}" role="presentation"><a href="#" role="tab">{text}</a></li>',
        "menu": '<aside class="menu mb-2"><ul class="menu-list" role="menu">{items}</ul></aside>',
        "menuitem": '<li role="presentation"><a href="#" role="menuitem">{text}</a></li>',
        "nav": '<nav class="breadcrumb is-small"><ul>{items}</ul></nav>',
        "navlink": '<li><a href="#">{text}</a></li>',
        "table": '<table class="table is-narrow {table_look}"><thead><tr>{heads}</tr></thead>'
        "<tbody>{rows}</tbody></table>",
        "card": '<div class="card mb-2"><header class="card-header">'
        '<p class="card-header-title p-1">{title}</p></header>'
        '<div class="card-content p-2">{body}</div></div>',
        "heading": '<h2 class="title is-5 mb-2">{text}</h2>',
        "paragraph": '<p class="mb-2">{body}</p>',
    },
    variants=(
        *("primary", "link", "info", "success", "warning", "danger", "light", "dark", "white"),
        *("primary is-outlined", "danger is-light"),
    ),
    dark="data-theme",
)
THEMES = {theme.name: theme for theme in (PLAIN, PICO, BOOTSTRAP, BULMA)}
